"""Hooks of the profiler, and the events that they record."""

from collections.abc import Callable


class EventLog:
    """Events of one session, and their clock."""

    def __init__(self, most: int, clock: Callable[[], int] | None = None) -> None:
        """Keeps at most `most` events. The default `clock` is the monotonic one."""

    @property
    def active(self) -> bool:
        """True during the session. While false, hooks record nothing."""

    @active.setter
    def active(self, arg: bool, /) -> None: ...

    @property
    def base_ns(self) -> int:
        """Clock at the start of the session; times of events are relative to it."""

    @property
    def dropped(self) -> int:
        """Number of events that were dropped because the log was full."""

    def put(self, begin: bool, phase: int, label: int) -> None:
        """Records that a phase begins or ends now."""

    def report(self, phase: int, nanoseconds: int) -> None:
        """Records a duration instead of a moment."""

    def drain(self) -> bytes:
        """Removes all events so far and returns them in the wire format."""

class Timed:
    """Wrapper of a function that records when its calls begin and end."""

    def __call__(self, /, *args, **kwargs):
        """Call self as a function."""

    def __getattribute__(self, name, /):
        """Return getattr(self, name)."""

    def __setattr__(self, name, value, /):
        """Implement setattr(self, name, value)."""

    def __delattr__(self, name, /):
        """Implement delattr(self, name)."""

    def __get__(self, instance, owner=None, /):
        """Return an attribute of instance, which is of type owner."""

    def __reduce__(self) -> str: ...

def timed(log: EventLog, function: object, phase: int, label: int, note: Callable[[tuple[object, ...], dict[str, object] | None], object] | None = None, outermost: bool = False) -> Timed:
    """
    Returns a wrapper of `function`. `note` is called with the positional and named arguments of each call. `outermost`: calls inside another such call of the same thread are not recorded.
    """

class Updates:
    """Hooks around the steps of optimizers."""

    def __init__(self, log: EventLog, phase: int, label_of: Callable[[object], int], at_step: Callable[[int], int]) -> None:
        """
        `label_of` numbers an optimizer. `at_step(steps since its last call)` returns the number of steps until its next call.
        """

    def before(self, optimizer: object, args: object, kwargs: object) -> None:
        """Hook before a step."""

    def after(self, optimizer: object, args: object, kwargs: object) -> None:
        """Hook after a step."""
