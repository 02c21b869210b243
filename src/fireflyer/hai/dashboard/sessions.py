"""Browsers that are signed in, and one-time codes that sign one in. In the memory of one server: nothing of
it is on disk, so a new server asks everybody to sign in again.

Of a cookie and of a code only the SHA-256 is kept. A session holds as long as its token is taken: revoking
the token, its expiry and disabling the user end it before the next answer, on open streams before the next
message.
"""

import secrets
import time
from collections.abc import Callable

import msgspec

from fireflyer.hai.identity import HOME_TOKEN, Identity, hash_secret
from fireflyer.hai.server.access import Accounts

IDLE_S = 12 * 3600.0
"""A session ends when its browser has asked for nothing in so long."""

LONGEST_S = 7 * 86_400.0
"""A session ends so long after it was begun."""

CODE_S = 60.0
"""A code is taken for so long, once."""

SESSIONS_PER_TOKEN = 50
CODES_PER_TOKEN = 10
"""The oldest go first."""


class Session(msgspec.Struct, kw_only=True):
    """One browser."""

    who: Identity
    csrf: str
    """What its forms carry."""
    begun: float
    seen: float


class _Code(msgspec.Struct, frozen=True):
    who: Identity
    until: float


class Sessions:
    """All sessions of one server. Used on its loop alone.

    Args:
        accounts: says whether a token is still taken.
        clock: monotonic seconds.
    """

    def __init__(self, accounts: Accounts, clock: Callable[[], float] = time.monotonic) -> None:
        self._accounts = accounts
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._codes: dict[str, _Code] = {}

    def taken(self, who: Identity) -> bool:
        """Whether this identity's token is still good."""
        return who.token == HOME_TOKEN or self._accounts.taken(who.token)

    # -- codes -------------------------------------------------------------------------------------

    def code(self, who: Identity) -> str:
        """A code that signs one browser in as this identity."""
        now = self._clock()
        self._codes = {key: code for key, code in self._codes.items() if code.until > now}
        mine = [key for key, code in self._codes.items() if code.who.token == who.token]
        for key in mine[: max(0, len(mine) - CODES_PER_TOKEN + 1)]:
            del self._codes[key]
        text = secrets.token_urlsafe(32)
        self._codes[hash_secret(text)] = _Code(who, now + CODE_S)
        return text

    def redeem(self, text: str, lets_in: Callable[[str], bool]) -> Identity | None:
        """Whose code this is; from now on it is nobody's. None: it is none, is used up, or too old; or is of
        a token that this door does not let in, and is left for the one that does."""
        key = hash_secret(text)
        code = self._codes.get(key)
        if code is None or not lets_in(code.who.token):
            return None
        del self._codes[key]
        return code.who if code.until > self._clock() and self.taken(code.who) else None

    # -- sessions ----------------------------------------------------------------------------------

    def begin(self, who: Identity) -> str:
        """Begins a session; returns the secret that its cookie carries."""
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
        """The session of a cookie; it was seen now."""
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
        """Whether the session has not ended; asking does not make it last."""
        session = self._sessions.get(hash_secret(secret))
        return session is not None and self._good(session, self._clock())

    def end(self, secret: str) -> None:
        """Signs out."""
        self._sessions.pop(hash_secret(secret), None)

    def _good(self, session: Session, now: float) -> bool:
        if now - session.seen > IDLE_S or now - session.begun > LONGEST_S:
            return False
        return self.taken(session.who)
