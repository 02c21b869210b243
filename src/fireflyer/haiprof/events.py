"""Events of a profiled process: the beginning or end of a phase in one thread, as one integer.

An event is `nanoseconds since the start of the session << 17 | code`. The code holds, from the
lowest bit: 1 bit begin, 4 bits phase, 4 bits thread, 8 bits label. A label is the number of an
optimizer, module, function or callback; its name is sent once, apart from the events. Threads and
labels beyond the highest number share that number. The time has 47 bits, 39 hours.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PHASES = (
    "forward", "backward", "optimizer", "data", "communication", "checkpoint", "callbacks",
    "framework", "other",
)  # fmt: skip
"""Names of the phases. `callbacks` is the time in a Trainer's callbacks and loggers, and
`framework` the time in the Trainer's own loop. `other` has no events: it is the rest of a step."""

(
    FORWARD, BACKWARD, OPTIMIZER, DATA, COMMUNICATION, CHECKPOINT, CALLBACKS, FRAMEWORK, OTHER, UPDATE,
) = range(10)  # fmt: skip
"""Numbers of the phases. UPDATE is a whole step of an optimizer; its time counts as `optimizer`.
An event of phase OTHER is a report, see `PhaseAccountant`."""

MOST_THREADS = 15
MOST_LABELS = 255
CODE_BITS = 17


class Event(NamedTuple):
    """Beginning or end of a phase."""

    time_ns: int
    begin: bool
    phase: int
    thread: int
    label: int


def code(begin: bool, phase: int, thread: int = 0, label: int = 0) -> int:
    """Returns the low bits of an event."""
    return begin | phase << 1 | thread << 5 | label << 9


def packed(events: Iterable[Event]) -> bytes:
    """Returns events in the format of messages: 64-bit integers in this machine's byte order."""
    return array(
        "Q", (e.time_ns << CODE_BITS | code(e.begin, e.phase, e.thread, e.label) for e in events)
    ).tobytes()


def unpacked(data: bytes) -> Iterator[Event]:
    """Yields the events of `packed` data.

    Raises:
        ValueError: the length is not a multiple of 8 bytes.
    """
    words = array("Q")
    words.frombytes(data)
    for word in words:
        yield Event(
            word >> CODE_BITS, bool(word & 1), word >> 1 & 15, word >> 5 & 15, word >> 9 & 255
        )
