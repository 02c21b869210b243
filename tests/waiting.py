"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable

LIMIT_S = 240.0
_LOOK_S = 0.001


def until(
    holds: Callable[[], bool], what: Callable[[], object] = lambda: "it did not come"
) -> None:
    """Returns once something holds that must come.

    Raises:
        AssertionError: it has not come in LIMIT_S; `what` says how things stand.
    """
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, what()
        time.sleep(_LOOK_S)
