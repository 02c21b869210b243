"""Events of a profiled process: the beginning or end of a phase in one thread, as one integer.

An event is `nanoseconds since the start of the session << 16 | code`. The code holds, from the lowest
bit: 1 bit begin, 3 bits phase, 4 bits thread, 8 bits label. A label numbers the optimizer, module or
function of the event; its name travels once, beside the events. Numbers that do not fit share the
last one.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PHASES = ("forward", "backward", "optimizer", "data", "communication", "checkpoint", "other")
"""Names of the phases. `other` has no events: it is the rest of a step."""

FORWARD, BACKWARD, OPTIMIZER, DATA, COMMUNICATION, CHECKPOINT, OTHER, UPDATE = range(8)
"""Numbers of the phases. UPDATE is a whole step of an optimizer; its time counts as `optimizer`.
An event of phase OTHER is a report, see `PhaseAccountant`."""

MOST_THREADS = 15
MOST_LABELS = 255
CODE_BITS = 16


class Event(NamedTuple):
    """Beginning or end of a phase."""

    time_ns: int
    begin: bool
    phase: int
    thread: int
    label: int


def code(begin: bool, phase: int, thread: int = 0, label: int = 0) -> int:
    """Returns the low bits of an event."""
    return begin | phase << 1 | thread << 4 | label << 8


def packed(events: Iterable[Event]) -> bytes:
    """Returns events as they travel: 64-bit integers of this machine's byte order."""
    return array(
        "q", (e.time_ns << CODE_BITS | code(e.begin, e.phase, e.thread, e.label) for e in events)
    ).tobytes()


def unpacked(data: bytes) -> Iterator[Event]:
    """Yields the events of `packed` data.

    Raises:
        ValueError: the length is not a multiple of 8 bytes.
    """
    words = array("q")
    words.frombytes(data)
    for word in words:
        yield Event(
            word >> CODE_BITS, bool(word & 1), word >> 1 & 7, word >> 4 & 15, word >> 8 & 255
        )
