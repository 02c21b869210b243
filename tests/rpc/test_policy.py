"""Retries, on a clock of the test's."""

import random
from typing import Any

import pytest

from fireflyer.clock import ManualClock
from fireflyer.errors import ConfigError, Corrupted, DeadlineExceeded, NoSpace, PeerLost
from fireflyer.rpc.policy import Attempts, Policy


def attempts(clock: ManualClock, deadline_s: float, policy: Policy | None = None) -> Attempts:
    return Attempts(policy or Policy(), "stat", clock.monotonic(), deadline_s, random.Random(1))


def test_pauses_double_up_to_the_longest_with_jitter() -> None:
    clock, policy = ManualClock(), Policy(pause_s=0.1, longest_pause_s=0.5)
    of = attempts(clock, 100, policy)
    pauses = [of.pause_after(PeerLost("x"), clock.monotonic()) for _ in range(6)]
    for pause, limit in zip(pauses, (0.1, 0.2, 0.4, 0.5, 0.5, 0.5), strict=True):
        assert limit / 2 <= pause <= limit
    assert len(set(pauses)) == 6


def test_only_what_may_pass_is_tried_again() -> None:
    clock, error = ManualClock(), Corrupted("chunk 7")
    with pytest.raises(Corrupted) as raised:
        attempts(clock, 100).pause_after(error, clock.monotonic())
    assert raised.value is error


def test_what_the_caller_wants_at_once_is_not_tried_again() -> None:
    clock, error = ManualClock(), NoSpace("the disk is full")
    assert attempts(clock, 100).pause_after(error, clock.monotonic()) > 0
    with pytest.raises(NoSpace):
        attempts(clock, 100, Policy(final=(NoSpace,))).pause_after(error, clock.monotonic())


def test_only_until_the_deadline() -> None:
    clock = ManualClock(50)
    of, error, made = attempts(clock, 10), PeerLost("x"), 0

    def all_of_them() -> None:
        nonlocal made
        while True:
            clock.advance(of.attempt_timeout(clock.monotonic()) / 1000)
            clock.advance(of.pause_after(error, clock.monotonic()))
            made += 1

    with pytest.raises(PeerLost) as raised:
        all_of_them()
    assert raised.value is error
    assert made > 10
    assert clock.monotonic() < 60


def test_an_attempt_takes_no_more_than_its_own_limit_and_what_is_left() -> None:
    clock = ManualClock()
    of = attempts(clock, 12, Policy(attempt_s=5))
    limits = []
    for _ in range(3):
        limits.append(of.attempt_timeout(clock.monotonic()))
        clock.advance(limits[-1])
    assert limits == [5, 5, 2]
    with pytest.raises(DeadlineExceeded, match="stat: no answer within 12 s"):
        of.attempt_timeout(clock.monotonic())


def test_times_that_cannot_be() -> None:
    wrongs: list[dict[str, Any]] = [{"pause_s": 0.0}, {"pause_s": 2.0}, {"attempt_s": 0.0}]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            Policy(**wrong)
