"""Buffer of events between the threads that train and the agent."""

from collections.abc import Callable

from fireflyer._native.haiprof import EventLog
from fireflyer.haiprof.events import MOST_LABELS

MOST_EVENTS = 1 << 20
"""Maximum number of events that wait for a profiler that does not read (8 MB in messages)."""

CLOCK: Callable[[], int] | None = None
"""Clock of new buffers in nanoseconds; None: the monotonic clock, read without a Python call."""


class EventBuffer:
    """Events of one session. Any thread may add events; only the agent drains the buffer. `active`
    is False before and after the session and in forked children; then hooks do nothing.
    """

    def __init__(self) -> None:
        self.log = EventLog(MOST_EVENTS, CLOCK)
        """Native log in which hooks record events."""
        self.base_ns = self.log.base_ns
        self.collectives: list[tuple[str, int, int, list[int]]] | None = None
        self._labels: dict[object, int] = {}
        self._new_labels: dict[int, str] = {}

    @property
    def active(self) -> bool:
        """True while hooks record."""
        return self.log.active

    @active.setter
    def active(self, value: bool) -> None:
        self.log.active = value

    @property
    def dropped(self) -> int:
        """Returns the number of events that were dropped because the buffer was full."""
        return self.log.dropped

    def label(self, key: object, name: str) -> int:
        """Returns the number of a label. `key` identifies the label, and `name` is its text in
        reports."""
        number = self._labels.get(key)
        if number is None:
            number = min(len(self._labels), MOST_LABELS)
            self._new_labels[number] = name if number < MOST_LABELS else "others"
            self._labels[key] = number
        return number

    def drain(self) -> tuple[bytes, dict[int, str]]:
        """Removes and returns all events and new labels so far."""
        events = self.log.drain()
        labels, self._new_labels = self._new_labels, {}
        return events, labels
