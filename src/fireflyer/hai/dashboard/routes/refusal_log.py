"""Log of rejected forms and sign-ins: a line of the audit log if the user is known, else of the
server's log. Any client can send such requests, so each log has a limit of lines a minute;
rejections beyond the limit are only counted."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from fastapi import Request

from fireflyer.errors import AuthError, PermissionDenied
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.model.identity import Identity, split_token
from fireflyer.log import get_logger

LINES = 30
"""Maximum lines a minute in the audit log."""

MINUTE_S = 60.0

_log = get_logger("hai.dashboard")


def _later(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)


class RefusalLog:
    """Rejected requests of one server. Used on its loop only.

    Args:
        trail: audit log of the same server.
        accounts: finds the users of tried tokens.
        later: calls a function after a delay in seconds.
    """

    def __init__(
        self, trail: AuditLog, accounts: Accounts, later: Callable[[float, Callable[[], None]], None] = _later
    ) -> None:  # fmt: skip
        self._trail = trail
        self._accounts = accounts
        self._later = later
        self._minute = False
        """True while a minute, to which the limits apply, has begun and not ended."""
        self._lines = 0
        self._logged = False
        self._counted = 0
        """Rejections not logged yet."""
        self._last = ""

    def form(self, request: Request, why: str) -> PermissionDenied:
        """Logs that a session's form was rejected.

        Returns:
            the error to raise.
        """
        error = PermissionDenied(why)
        who: Identity = request.state.who
        if self._within_limit():
            self._write(who, request.scope["route"].name, request.url.path, error)
        else:
            self._count(who.address, error)
        return error

    def sign_in(self, request: Request, text: str, error: AuthError) -> None:
        """Logs that a sign-in with a token, or any other text, was rejected."""
        address = request.client.host if request.client is not None else ""
        parts = split_token(text)
        if parts is not None and self._lines < LINES:
            for view in self._accounts.tokens(None):
                if view.id == parts[0] and self._within_limit():
                    who = Identity(user=view.user, token=view.id, scope=view.scope, address=address)
                    self._write(who, "sign_in", "", error)
                    return
        self._count(address, error)

    def _within_limit(self) -> bool:
        """Counts one line against this minute's limit of the audit log; returns whether the limit
        allows the line."""
        self._begin()
        self._lines += 1
        return self._lines <= LINES

    def _write(self, who: Identity, what: str, object: str, error: AuthError) -> None:
        with suppress(type(error)), self._trail.change(who, what, object):
            raise error

    def _count(self, address: str, error: AuthError) -> None:
        self._counted += 1
        self._last = f"from {address}: {error}"
        if not self._logged:
            self._log_counted()

    def _log_counted(self) -> None:
        self._begin()
        self._logged = True
        _log.warning("rejected sign-ins and forms: %d, the last %s", self._counted, self._last)
        self._counted = 0

    def _begin(self) -> None:
        if not self._minute:
            self._minute = True
            self._later(MINUTE_S, self._end)

    def _end(self) -> None:
        self._minute = self._logged = False
        self._lines = 0
        if self._counted:
            self._log_counted()
