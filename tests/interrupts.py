"""Ctrl-C in a wait that lasts until another rank comes."""

import signal
from collections.abc import Callable
from types import FrameType

TICK_S = 0.02


def interrupted(wait: Callable[[], object]) -> bool:
    """Calls `wait`, which would last until another rank comes, and interrupts it as Ctrl-C does.

    A signal counts only if the one before it found the main thread at the same instruction, that is
    inside one native call: a busy machine must not interrupt the way to the wait.
    """
    seen: tuple[FrameType | None, int] = (None, 0)

    def tick(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        at = (frame, frame.f_lasti if frame else 0)
        if at == seen:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt
        seen = at

    signal.signal(signal.SIGALRM, tick)
    try:
        signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
        wait()
    except Exception:  # noqa: BLE001  # as a script does
        return False
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return False
