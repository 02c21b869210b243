"""Who may call which route. Nothing is answered without a token; a route says which scope it needs."""

import hmac
import os
import pwd
from collections.abc import Callable
from typing import Any

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from fireflyer.errors import AuthError, Unauthenticated
from fireflyer.hai import identity
from fireflyer.hai.database.trail import Trail
from fireflyer.hai.identity import HOME_TOKEN, Identity
from fireflyer.hai.server.access import Accounts
from fireflyer.hai.server.answers import refuse


class Gate:
    """Answers 401 to whatever does not carry a token, also where there is no route.

    Args:
        app: gets the requests of the others; `request.state.who` is the Identity.
        accounts: knows the users' tokens.
        home_token: what the home's file holds: its owner's, taken where it listens on loopback; else None.
    """

    def __init__(self, app: ASGIApp, accounts: Accounts, home_token: str | None) -> None:
        self._app = app
        self._accounts = accounts
        self._home = None if home_token is None else b"Bearer " + home_token.encode()
        self._owner = owner()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                who = self._identify(scope)
            except AuthError as error:
                await refuse(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["who"] = who
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> Identity:
        given = dict(scope["headers"]).get(b"authorization", b"")
        address = scope["client"][0] if scope.get("client") else ""
        if self._home is not None and hmac.compare_digest(given, self._home):
            return Identity(user=self._owner, token=HOME_TOKEN, scope="admin", address=address)
        kind, _, text = given.partition(b" ")
        if kind != b"Bearer":
            raise Unauthenticated("the bearer token is missing or wrong")
        return self._accounts.identify(text.decode("latin-1"), address)


class Needs:
    """The dependency of a route: the Identity, if its token has this scope; else a refusal, which for
    anything but a look is a line of the audit log."""

    def __init__(self, scope: identity.Scope, trail: Trail) -> None:
        self.scope = scope
        self._trail = trail

    async def __call__(self, request: Request) -> Identity:
        who: Identity = request.state.who
        if not who.allows(self.scope) and request.method != "GET":
            with self._trail.change(who, request.scope["route"].name, request.url.path):
                who.require(self.scope)
        who.require(self.scope)
        return who


def needing(trail: Trail) -> Callable[[identity.Scope], Any]:
    """What makes the dependencies: `Depends(needs("submit"))`."""
    return lambda scope: Depends(Needs(scope, trail))


def owner() -> str:
    """The name of the user that this process runs as: who holds the home's own token."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid{os.geteuid()}"
