"""Events that the tiers of a store handle, and the actions that they request."""

import enum
from collections.abc import Mapping
from typing import NamedTuple


class Place(enum.Enum):
    """State of an expert in one process."""

    COLD = "cold"
    """Only in the store's folder."""
    LOADING = "loading"
    """Being read into warm memory; not visible to callers yet."""
    WARM = "warm"
    """Verified, in warm memory."""
    HEATING = "heating"
    """In warm memory, and being copied to the hot tier."""
    HOT = "hot"
    """In the hot tier and in warm memory."""
    EVICTING = "evicting"
    """Being removed from warm memory."""
    DAMAGED = "damaged"
    """The bytes of the expert's file do not match its manifest."""


class Reason(enum.Enum):
    """Cause of a refusal."""

    DAMAGED = "damaged"
    TOO_LARGE = "too large"
    FAILED = "failed"
    IN_USE = "in use"
    UNKNOWN = "unknown"


# Events ------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """An expert of this size exists. If it was DAMAGED, it becomes COLD and can be loaded again."""

    name: str
    bytes: int


class Wanted(NamedTuple):
    """A caller waits for the expert."""

    name: str
    now: int


class Withdrawn(NamedTuple):
    """A caller no longer waits for the expert."""

    name: str


class Released(NamedTuple):
    """A caller no longer uses an expert that it got."""

    name: str


class Hinted(NamedTuple):
    """These experts are expected next, in this order; replaces the previous hint."""

    names: tuple[str, ...]


class Seen(NamedTuple):
    """Current content of warm memory, which other processes change, too."""

    images: Mapping[str, int]
    """Time of the last use of each known expert that is in warm memory."""
    foreign_bytes: int
    """Bytes of all other files in warm memory, except for the experts that this process loads."""


class Loaded(NamedTuple):
    """The expert is in warm memory, verified."""

    name: str


class Failed(NamedTuple):
    """The expert could not be loaded."""

    name: str
    damaged: bool


class FileChanged(NamedTuple):
    """The expert changed while it was read; its new size is `bytes`."""

    name: str
    bytes: int


class Heated(NamedTuple):
    """The expert is in the hot tier."""

    name: str


class Lost(NamedTuple):
    """The expert was removed from warm memory before this process could use it."""

    name: str


class Evicted(NamedTuple):
    """The expert was removed from warm memory."""

    name: str


class EvictionFailed(NamedTuple):
    """The expert could not be removed from warm memory, because a process or tensor uses it."""

    name: str


class Dropped(NamedTuple):
    """A caller wants the expert to be removed from the store."""

    name: str


Event = (
    Known
    | Wanted
    | Withdrawn
    | Released
    | Hinted
    | Seen
    | Loaded
    | Failed
    | FileChanged
    | Heated
    | Lost
    | Evicted
    | EvictionFailed
    | Dropped
)

# Actions -----------------------------------------------------------------------------------------


class Load(NamedTuple):
    """Read the expert into warm memory; Loaded, Failed or FileChanged follows."""

    name: str
    bytes: int


class Heat(NamedTuple):
    """Copy the expert from warm memory to the hot tier; Heated, Lost or Failed follows."""

    name: str


class Cool(NamedTuple):
    """Drop the expert's copy in the hot tier."""

    name: str


class Evict(NamedTuple):
    """Remove the expert from warm memory; Evicted or EvictionFailed follows."""

    name: str


class Serve(NamedTuple):
    """Return the expert to all callers that wait for it; each uses it until Released."""

    name: str
    callers: int


class Refuse(NamedTuple):
    """Raise the error of this reason in all callers that wait for the expert or remove it."""

    name: str
    reason: Reason


class Delete(NamedTuple):
    """Remove the expert from the store's folder; the tiers have dropped it."""

    name: str


Action = Load | Heat | Cool | Evict | Serve | Refuse | Delete
