"""Wrong tokens: many of one address are answered late, none of another, and no valid one."""

import asyncio
import logging

import pytest

from fireflyer.errors import AuthError, PermissionDenied, Throttled, Unauthenticated
from fireflyer.hai.http.throttle import ADDRESSES, DELAY_S, FREE, MINUTE_S, WAITING, Throttle

WRONG = Unauthenticated("the token is missing or wrong")


class Pace:
    """A clock, and the delays asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.wake = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def hold(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.wake.wait()


def kinds(throttle: Throttle, address: str, count: int) -> list[type[AuthError]]:
    async def ask() -> list[type[AuthError]]:
        return [type(await throttle.refused(address, WRONG)) for _ in range(count)]

    return asyncio.run(ask())


def test_many_wrong_tokens_of_one_address_are_answered_late(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pace = Pace()
    throttle = Throttle(pace.sleep, lambda: pace.now)
    with caplog.at_level(logging.WARNING, logger="fireflyer.hai"):
        assert kinds(throttle, "a", FREE + 2) == [Unauthenticated] * FREE + [Throttled] * 2
    assert pace.slept == [DELAY_S] * 2
    assert len(caplog.records) <= 1, "one line, however many there are"
    assert kinds(throttle, "b", 1) == [Unauthenticated]
    pace.now = MINUTE_S
    assert kinds(throttle, "a", 1) == [Unauthenticated], "the next minute begins anew"
    denied = PermissionDenied("the scope is too small")
    assert asyncio.run(Throttle(pace.sleep, lambda: 0.0).refused("a", denied)) is denied


def test_what_is_kept_and_what_waits_is_bounded() -> None:
    pace = Pace()
    throttle = Throttle(pace.hold, lambda: pace.now)

    async def ask() -> int:
        for number in range(ADDRESSES + FREE):
            await throttle.refused(f"address {number}", WRONG)
        waiting = [asyncio.ensure_future(throttle.refused("x", WRONG)) for _ in range(WAITING + 3)]
        await asyncio.sleep(0)
        done = [each for each in waiting if each.done()]
        assert all(isinstance(each.result(), Throttled) for each in done)
        pace.wake.set()
        await asyncio.gather(*waiting)
        return len(done)

    assert asyncio.run(ask()) == 3
    assert len(pace.slept) == WAITING
    assert len(throttle._counts) == ADDRESSES + 1
