"""Stops and continues processes for a while, and leaves none of them stopped:

    python -m fireflyer.hai.rehearsal.slowdown STOPPED_MS RUNNING_MS SECONDS PIDFD...

There are two processes. The signalling process ends when its standard input does (its starter has
died) or when the time is over. A warden detects any end of it, and continues all targets. If the
warden ends first, the other process does the same. Only killing both in one instant can leave a
process stopped.

Targets are inherited pidfds: a reused process number is never signalled. Prints "slowing" once it
begins.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence

from fireflyer.hai.rehearsal.plan import MAX_S


def main(arguments: list[str]) -> int:
    """Returns once no target is stopped."""
    stopped_ms, running_ms, seconds = map(float, arguments[:3])
    if not (stopped_ms > 0 and running_ms >= 0 and 0 <= seconds <= MAX_S):
        return 2
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    targets = list(map(int, arguments[3:]))
    mine, theirs = os.pipe()  # the warden reads end of file when this process ends
    ours, wardens = os.pipe()  # `ours` ends when the warden does
    warden = os.fork()
    if warden == 0:
        os.close(theirs)
        os.close(ours)
        _guard(mine, targets)
        os._exit(0)
    os.close(mine)
    os.close(wardens)
    try:
        sys.stdout.write("slowing\n")
        sys.stdout.flush()
        _slow(targets, ours, stopped_ms / 1e3, running_ms / 1e3, time.monotonic() + seconds)
    finally:
        _send(targets, signal.SIGCONT)
        os.close(theirs)
        os.waitpid(warden, 0)
    return 0


def _guard(pipe: int, targets: Sequence[int]) -> None:
    """Runs the warden: waits for the other process to end, then continues all targets."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(pipe, 1):
        pass
    _send(targets, signal.SIGCONT)


def _slow(targets: list[int], warden: int, stopped_s: float, running_s: float, end: float) -> None:
    """Stops and continues targets until the time is over, or the starter, the warden or all targets
    are gone."""
    left = list(targets)
    while time.monotonic() < end:
        for number, length in ((signal.SIGSTOP, stopped_s), (signal.SIGCONT, running_s)):
            _send(left, number)
            until = min(time.monotonic() + length, end)
            ready, _, _ = select.select(
                [0, warden, *left], [], [], max(until - time.monotonic(), 0)
            )
            if 0 in ready or warden in ready:
                return
            left = [target for target in left if target not in ready]
            if not left:
                return


def _send(targets: Sequence[int], number: int) -> None:
    for target in targets:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(target, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
