"""Stops and continues processes for some time, and leaves no process stopped:

    python -m fireflyer.hai.rehearsal.slowdown STOPPED_MS RUNNING_MS SECONDS PIDFD...

The program consists of two processes. The signalling process ends when the time is over, or when
its standard input ends because its starter has died. The watchdog process detects any end of the
signalling process, and then continues all targets. If the watchdog process ends first, the
signalling process continues all targets. A target can stay stopped only if both processes are
killed at the same time.

Targets are inherited pidfds, so a reused process number is never signalled. The program prints
"slowing" once it begins.
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
    """Runs the program; when it returns, no target is stopped."""
    stopped_ms, running_ms, seconds = map(float, arguments[:3])
    if not (stopped_ms > 0 and running_ms >= 0 and 0 <= seconds <= MAX_S):
        return 2
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    targets = list(map(int, arguments[3:]))
    mine, theirs = os.pipe()  # the watchdog reads end of file when this process ends
    ours, watchdog_end = os.pipe()  # `ours` reads end of file when the watchdog ends
    watchdog = os.fork()
    if watchdog == 0:
        os.close(theirs)
        os.close(ours)
        _guard(mine, targets)
        os._exit(0)
    os.close(mine)
    os.close(watchdog_end)
    try:
        sys.stdout.write("slowing\n")
        sys.stdout.flush()
        _slow(targets, ours, stopped_ms / 1e3, running_ms / 1e3, time.monotonic() + seconds)
    finally:
        _send(targets, signal.SIGCONT)
        os.close(theirs)
        os.waitpid(watchdog, 0)
    return 0


def _guard(pipe: int, targets: Sequence[int]) -> None:
    """Runs the watchdog process: waits for the end of the signalling process, then continues all
    targets."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(pipe, 1):
        pass
    _send(targets, signal.SIGCONT)


def _slow(
    targets: list[int], watchdog: int, stopped_s: float, running_s: float, end: float
) -> None:
    """Stops and continues targets until the time is over, or until the starter, the watchdog or all
    targets are gone."""
    left = list(targets)
    while time.monotonic() < end:
        for number, length in ((signal.SIGSTOP, stopped_s), (signal.SIGCONT, running_s)):
            _send(left, number)
            until = min(time.monotonic() + length, end)
            ready, _, _ = select.select(
                [0, watchdog, *left], [], [], max(until - time.monotonic(), 0)
            )
            if 0 in ready or watchdog in ready:
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
