"""Retries of failed calls: limits, pauses and the errors that are retried."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from fireflyer.errors import ConfigError, DeadlineExceeded, FireflyerError


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Retry policy of one caller. Pauses double from one failure to the next."""

    attempt_s: float = 5.0
    """Timeout of one attempt in seconds; another attempt follows."""
    pause_s: float = 0.02
    """First pause in seconds; jitter reduces each pause by up to a half."""
    longest_pause_s: float = 1.0
    final: tuple[type[FireflyerError], ...] = ()
    """Transient errors that this caller does not retry."""
    before_retry: Callable[[], None] | None = None
    """Callback before each further attempt; an error that it raises ends the call."""

    def __post_init__(self) -> None:
        if not 0 < self.pause_s <= self.longest_pause_s or self.attempt_s <= 0:
            raise ConfigError(
                f"invalid {self}: expected times above 0, pause_s at most longest_pause_s"
            )


class Attempts:
    """Attempts of one call. Pure: the time is an argument.

    Only `retryable` errors lead to another attempt, and only if it begins before the deadline.
    """

    def __init__(
        self, policy: Policy, what: str, now: float, deadline_s: float, draw: random.Random
    ) -> None:
        """Starts at `now`, with a deadline `deadline_s` later; `what` names the call in messages."""
        self._policy = policy
        self._what = what
        self._limit_s = deadline_s
        self._deadline = now + deadline_s
        self._pause = policy.pause_s
        self._random = draw

    def attempt_timeout(self, now: float) -> float:
        """Returns the timeout of the next attempt, in seconds.

        Raises:
            DeadlineExceeded: no time is left.
        """
        left = self._deadline - now
        if left <= 0:
            raise DeadlineExceeded(f"{self._what}: no answer within {self._limit_s:g} s")
        return min(left, self._policy.attempt_s)

    def pause_after(self, error: FireflyerError, now: float) -> float:
        """Returns the seconds to wait before the next attempt.

        Raises:
            FireflyerError: `error` itself, if there is no next attempt.
        """
        pause = self._pause * self._random.uniform(0.5, 1.0)
        self._pause = min(2 * self._pause, self._policy.longest_pause_s)
        final = not error.retryable or isinstance(error, self._policy.final)
        if final or now + pause >= self._deadline:
            raise error
        return pause
