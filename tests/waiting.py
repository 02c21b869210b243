"""Wait for what other processes and threads do: the one place from which tests take their limits."""

import os
import time
from collections.abc import Callable

LIMIT_S = 0.75 * float(os.environ.get("FIREFLYER_TEST_DEADLINE_S", "120"))
"""A wait that fails says what it waited for, so it ends before the deadline of its test
(tests/plugins/hangs.py)."""

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
