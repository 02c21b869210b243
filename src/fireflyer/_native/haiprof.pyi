"""Hooks of the profiler, and the events that they record."""

from collections.abc import Callable


class EventLog:
    """Events of one session, and their clock."""

    def __init__(self, most: int, clock: Callable[[], int] | None = None) -> None:
        """Keeps `most` events. Without a `clock` it reads the monotonic one."""

    @property
    def active(self) -> bool:
        """False before and after the session: hooks record nothing."""

    @active.setter
    def active(self, arg: bool, /) -> None: ...

    @property
    def base_ns(self) -> int:
        """Time of the clock at the start, which events are relative to."""

    @property
    def dropped(self) -> int:
        """Events that found no room."""

    def put(self, begin: bool, phase: int, label: int) -> None:
        """Records that a phase begins or ends now."""

    def report(self, phase: int, nanoseconds: int) -> None:
        """Records a duration instead of a moment."""

    def drain(self) -> bytes:
        """Takes all events so far, as they travel."""

class Timed:
    """Stands for a function, and records when its calls begin and end."""

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
    Returns what stands for `function`. `note` gets positional and named arguments of each call. `outermost`: calls inside another such call of the same thread are not recorded.
    """

class Updates:
    """Hooks around the steps of optimizers."""

    def __init__(self, log: EventLog, phase: int, label_of: Callable[[object], int], at_step: Callable[[int], int]) -> None:
        """
        `label_of` numbers an optimizer. `at_step` gets the steps since its last call, and returns after how many to call it again.
        """

    def before(self, optimizer: object, args: object, kwargs: object) -> None:
        """Hook before a step."""

    def after(self, optimizer: object, args: object, kwargs: object) -> None:
        """Hook after a step."""
