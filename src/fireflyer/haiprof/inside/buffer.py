"""Buffer of events between the threads that train and the agent."""

from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns

from fireflyer.haiprof.events import CODE_BITS, MOST_LABELS, MOST_THREADS, code

MOST_EVENTS = 1 << 20
"""Events to keep for a profiler that does not read; 8 MB as they travel."""


class EventBuffer:
    """Events of one session. Any thread may put; only the agent drains.

    `active` is False before and after the session, and in forked children: hooks that are still in
    place then do nothing.
    """

    def __init__(self) -> None:
        self.base_ns = monotonic_ns()
        self.active = False
        self.collectives: list[tuple[str, int, int, list[int]]] | None = None
        self.dropped = 0
        self._events: list[int] = []
        self._slots: dict[int, int] = {}
        self._labels: dict[object, int] = {}
        self._new_labels: dict[int, str] = {}

    def label(self, key: object, name: str) -> int:
        """Returns the number of a label; `key` identifies it, `name` is for people."""
        number = self._labels.get(key)
        if number is None:
            number = min(len(self._labels), MOST_LABELS)
            self._new_labels[number] = name if number < MOST_LABELS else "others"
            self._labels[key] = number
        return number

    def known(self, key: object) -> int | None:
        """Returns the number of a label that exists."""
        return self._labels.get(key)

    def put(self, begin: bool, phase: int, label: int) -> None:
        """Records that a phase begins or ends now in this thread."""
        self._put((monotonic_ns() - self.base_ns) << CODE_BITS | code(begin, phase, 0, label))

    def report(self, phase: int, nanoseconds: int) -> None:
        """Records a duration instead of a moment."""
        self._put(nanoseconds << CODE_BITS | code(True, phase))

    def _put(self, word: int) -> None:
        ident = get_ident()
        slot = self._slots.get(ident)
        if slot is None:
            slot = self._slots.setdefault(ident, min(len(self._slots), MOST_THREADS))
        if len(self._events) < MOST_EVENTS:
            self._events.append(word | slot << 4)
        else:
            self.dropped += 1

    def recorder(self, phase: int, label: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Returns functions that record the beginning and the end of a phase; as `put`, faster."""
        base, events, slots = self.base_ns, self._events, self._slots
        first, last = code(True, phase, 0, label), code(False, phase, 0, label)

        def begin() -> None:
            slot = slots.get(get_ident())
            if slot is None or len(events) >= MOST_EVENTS:
                self.put(True, phase, label)
            else:
                events.append((monotonic_ns() - base) << CODE_BITS | first | slot << 4)

        def end() -> None:
            slot = slots.get(get_ident())
            if slot is None or len(events) >= MOST_EVENTS:
                self.put(False, phase, label)
            else:
                events.append((monotonic_ns() - base) << CODE_BITS | last | slot << 4)

        return begin, end

    def drain(self) -> tuple[list[int], dict[int, str]]:
        """Takes all events and new labels so far."""
        count = len(self._events)
        events = self._events[:count]
        del self._events[:count]
        labels, self._new_labels = self._new_labels, {}
        return events, labels
