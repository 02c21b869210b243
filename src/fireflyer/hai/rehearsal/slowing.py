"""Stops and continues processes for a while, and leaves none of them stopped:

    python -m fireflyer.hai.rehearsal.slowing STOPPED_MS RUNNING_MS SECONDS PIDFD...

Two processes. The one that signals ends when its standard input does (its starter has died) or the time is
over; a warden sees its end, whatever that was, and continues all targets. When the warden ends first, the
other does the same. So only who kills both in one instant leaves a process stopped.

Targets are inherited pidfds: a process number that is used again is never signalled. Prints "slowing" once it
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
    mine, theirs = os.pipe()  # the warden's end of file is our end
    ours, wardens = os.pipe()  # ours is the warden's
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
    """The warden: waits for the end of the other, then continues all."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(pipe, 1):
        pass
    _send(targets, signal.SIGCONT)


def _slow(targets: list[int], warden: int, stopped_s: float, running_s: float, end: float) -> None:
    """Until the time is over, or the starter, the warden or all targets are gone."""
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
