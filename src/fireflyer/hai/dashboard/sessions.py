"""Sessions of signed-in browsers, and one-time codes that sign one browser in. A server keeps both
in memory only, so a new server asks every user to sign in again.

Only the SHA-256 of a cookie or code is kept. A session is valid as long as its token. When the
token is revoked or expires, or its user is disabled, the session ends before the next response. An
open stream of the session ends before its next message.
"""

import secrets
import time
from collections.abc import Callable

import msgspec

from fireflyer.hai.http.access import Accounts
from fireflyer.hai.model.identity import HOME_TOKEN, Identity, hash_secret

IDLE_S = 12 * 3600.0
"""Seconds without a request after which a session ends."""

LONGEST_S = 7 * 86_400.0
"""Maximum seconds of a session."""

CODE_S = 60.0
"""Seconds for which a code is valid; it is accepted once."""

SESSIONS_PER_TOKEN = 50
CODES_PER_TOKEN = 10
"""Maximum numbers of sessions and of codes per token; the oldest are dropped first."""


class Session(msgspec.Struct, kw_only=True):
    """Session of one browser."""

    who: Identity
    csrf: str
    """Token in each form of the session, against cross-site request forgery."""
    begun: float
    seen: float


class _Code(msgspec.Struct, frozen=True):
    who: Identity
    until: float


class Sessions:
    """All sessions of one server. Used on its loop only.

    Args:
        accounts: tells whether a token is still valid.
        clock: monotonic seconds.
    """

    def __init__(self, accounts: Accounts, clock: Callable[[], float] = time.monotonic) -> None:
        self._accounts = accounts
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._codes: dict[str, _Code] = {}

    def valid(self, who: Identity) -> bool:
        """Returns whether this identity's token is still valid."""
        return who.token == HOME_TOKEN or self._accounts.valid(who.token)

    # -- codes -------------------------------------------------------------------------------------

    def code(self, who: Identity) -> str:
        """Creates a code that signs one browser in as this identity."""
        now = self._clock()
        self._codes = {key: code for key, code in self._codes.items() if code.until > now}
        mine = [key for key, code in self._codes.items() if code.who.token == who.token]
        for key in mine[: max(0, len(mine) - CODES_PER_TOKEN + 1)]:
            del self._codes[key]
        text = secrets.token_urlsafe(32)
        self._codes[hash_secret(text)] = _Code(who, now + CODE_S)
        return text

    def redeem(self, text: str, admits: Callable[[str], bool]) -> Identity | None:
        """Returns the identity of a code and invalidates the code. Returns None if the code is
        unknown, used or too old. Also returns None if this listener does not admit the code's
        token; the code then stays valid."""
        key = hash_secret(text)
        code = self._codes.get(key)
        if code is None or not admits(code.who.token):
            return None
        del self._codes[key]
        return code.who if code.until > self._clock() and self.valid(code.who) else None

    # -- sessions ----------------------------------------------------------------------------------

    def begin(self, who: Identity) -> str:
        """Begins a session; returns the secret for its cookie."""
        now = self._clock()
        self._sessions = {k: found for k, found in self._sessions.items() if self._good(found, now)}
        mine = [k for k, found in self._sessions.items() if found.who.token == who.token]
        for key in mine[: max(0, len(mine) - SESSIONS_PER_TOKEN + 1)]:
            del self._sessions[key]
        secret, csrf = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        session = Session(who=who, csrf=csrf, begun=now, seen=now)
        self._sessions[hash_secret(secret)] = session
        return secret

    def find(self, secret: str) -> Session | None:
        """Returns the session of a cookie, and marks the session as seen now."""
        key = hash_secret(secret)
        session = self._sessions.get(key)
        if session is None:
            return None
        now = self._clock()
        if not self._good(session, now):
            del self._sessions[key]
            return None
        session.seen = now
        return session

    def holds(self, secret: str) -> bool:
        """Returns whether the session is valid, without extending the session."""
        session = self._sessions.get(hash_secret(secret))
        return session is not None and self._good(session, self._clock())

    def end(self, secret: str) -> None:
        """Ends a session."""
        self._sessions.pop(hash_secret(secret), None)

    def _good(self, session: Session, now: float) -> bool:
        if now - session.seen > IDLE_S or now - session.begun > LONGEST_S:
            return False
        return self.valid(session.who)
