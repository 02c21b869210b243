"""Throttle of wrong tokens: an address that sends many of them gets delayed responses.

Requests with a valid token are never delayed, even from the same address, because a proxy may stand
between users and the server. A token has 256 random bits, so the throttle protects no secret. The
throttle limits the CPU time and log lines that a hostile client, or one with an outdated token, can
cause.
"""

import asyncio
from collections.abc import Awaitable, Callable

from fireflyer.errors import AuthError, Throttled, Unauthenticated
from fireflyer.log import get_logger

FREE = 600
"""Maximum refused requests of an address in a minute that are answered at once."""

DELAY_S = 1.0
"""Seconds by which the answer to each further request is delayed."""

WAITING = 64
"""Maximum number of delayed answers, over all addresses; further requests are answered at once."""

ADDRESSES = 1024
"""Maximum number of addresses that are counted in a minute; all others share one count."""

MINUTE_S = 60.0

_log = get_logger("hai")


class Throttle:
    """Counts of refused requests of one server, used on its loop only.

    Args:
        sleep: waits for a number of seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._sleep = sleep
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._counts: dict[str, int] = {}
        self._end = 0.0
        self._waiting = 0

    async def refused(self, address: str, error: AuthError) -> AuthError:
        """Counts a request without a valid token. Returns the error to answer with, after a delay
        if the address has sent too many."""
        now = self._clock()
        if now >= self._end:
            self._counts.clear()
            self._end = now + MINUTE_S
        if address not in self._counts and len(self._counts) >= ADDRESSES:
            address = ""
        count = self._counts[address] = self._counts.get(address, 0) + 1
        if count <= FREE or not isinstance(error, Unauthenticated):
            return error
        if count == FREE + 1:
            _log.warning("many requests without a valid token from %s", address or "many addresses")
        if self._waiting < WAITING:
            self._waiting += 1
            try:
                await self._sleep(DELAY_S)
            finally:
                self._waiting -= 1
        return Throttled(f"more than {FREE} requests without a valid token in a minute: {error}")
