"""Authentication and authorization: every request needs a token, and every route declares the scope
that it needs."""

import hmac
import os
import pwd
from collections.abc import Callable
from typing import Any

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from fireflyer.errors import AuthError, Unauthenticated
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.http.responses import refuse
from fireflyer.hai.http.throttle import Throttle
from fireflyer.hai.model import identity
from fireflyer.hai.model.identity import HOME_TOKEN, Identity


class Authenticator:
    """Middleware that answers 401 to every request without a valid token, even if no route matches.

    Args:
        app: gets the authenticated requests; `request.state.who` is the Identity.
        accounts: validates the users' tokens.
        home_token: the home owner's token, from the home's file; None on a listener other than
            loopback.
        throttle: delays the answers to wrong tokens.
    """

    def __init__(
        self, app: ASGIApp, accounts: Accounts, home_token: str | None, throttle: Throttle
    ) -> None:
        self._app = app
        self._throttle = throttle
        self._accounts = accounts
        self._home = None if home_token is None else b"Bearer " + home_token.encode()
        self._owner = owner()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                who = self._identify(scope)
            except AuthError as error:
                address = scope["client"][0] if scope.get("client") else ""
                answer = await self._throttle.refused(address, error)
                await refuse(answer)(scope, receive, send)
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
    """Dependency of a route: returns the Identity if its token has this scope, else raises. The
    audit log records a refused request, unless the request is a GET."""

    def __init__(self, scope: identity.Scope, trail: AuditLog) -> None:
        self.scope = scope
        self._trail = trail

    async def __call__(self, request: Request) -> Identity:
        who: Identity = request.state.who
        if not who.allows(self.scope) and request.method != "GET":
            with self._trail.change(who, request.scope["route"].name, request.url.path):
                who.require(self.scope)
        who.require(self.scope)
        return who


def needing(trail: AuditLog) -> Callable[[identity.Scope], Any]:
    """Returns the factory of the routes' dependencies; a route calls it as `needs("submit")`."""
    return lambda scope: Depends(Needs(scope, trail))


def owner() -> str:
    """Returns the name of the user that this process runs as: the owner of the home's token."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid{os.geteuid()}"
