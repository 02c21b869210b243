"""Events that the tiers of a store react to, and the actions that they ask for."""

import enum
from collections.abc import Mapping
from typing import NamedTuple


class Place(enum.Enum):
    """State of an expert in one process."""

    COLD = "cold"
    """Only in the store's folder."""
    LOADING = "loading"
    """Read into warm memory; no caller sees it yet."""
    WARM = "warm"
    """Verified, in warm memory."""
    HEATING = "heating"
    """In warm memory; on its way to the hot tier."""
    HOT = "hot"
    """In the hot tier, and still in warm memory."""
    EVICTING = "evicting"
    """Leaving warm memory."""
    DAMAGED = "damaged"
    """Its file does not have the bytes of its manifest."""


class Reason(enum.Enum):
    """Cause of a refusal."""

    DAMAGED = "damaged"
    TOO_LARGE = "too large"
    FAILED = "failed"
    IN_USE = "in use"
    UNKNOWN = "unknown"


# Events ------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """An expert of this size exists; a damaged one is tried again."""

    name: str
    bytes: int


class Wanted(NamedTuple):
    """A caller waits for the expert."""

    name: str
    now: int


class Withdrawn(NamedTuple):
    """A caller no longer waits."""

    name: str


class Released(NamedTuple):
    """A caller no longer uses an expert that it was served."""

    name: str


class Hinted(NamedTuple):
    """The experts that are expected next, in this order; replaces the hint before."""

    names: tuple[str, ...]


class Seen(NamedTuple):
    """Content of warm memory, which other processes fill and empty, too."""

    images: Mapping[str, int]
    """Time of the last use of each known expert that is in warm memory."""
    foreign_bytes: int
    """Bytes of all else in there, except for what this process loads."""


class Loaded(NamedTuple):
    """The expert is in warm memory, verified."""

    name: str


class Failed(NamedTuple):
    """The expert could not be loaded."""

    name: str
    damaged: bool


class Again(NamedTuple):
    """The expert changed while it was read, and has this size now."""

    name: str
    bytes: int


class Heated(NamedTuple):
    """The expert is in the hot tier."""

    name: str


class Lost(NamedTuple):
    """The expert left warm memory before it could be used."""

    name: str


class Evicted(NamedTuple):
    """The expert left warm memory."""

    name: str


class Kept(NamedTuple):
    """The expert could not leave warm memory: another process or a tensor uses it."""

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
    | Again
    | Heated
    | Lost
    | Evicted
    | Kept
    | Dropped
)

# Actions -----------------------------------------------------------------------------------------


class Load(NamedTuple):
    """Read the expert into warm memory; Loaded, Failed or Again follows."""

    name: str
    bytes: int


class Heat(NamedTuple):
    """Bring the expert from warm memory to the hot tier; Heated, Lost or Failed follows."""

    name: str


class Cool(NamedTuple):
    """Forget the expert's copy in the hot tier."""

    name: str


class Evict(NamedTuple):
    """Remove the expert from warm memory; Evicted or Kept follows."""

    name: str


class Serve(NamedTuple):
    """Hand the expert to all callers that wait for it; each holds it until Released."""

    name: str
    callers: int


class Refuse(NamedTuple):
    """Tell all callers that wait for the expert, or that removes it, why they do not get it."""

    name: str
    reason: Reason


class Delete(NamedTuple):
    """Remove the expert from the store's folder; the tiers no longer know it."""

    name: str


Action = Load | Heat | Cool | Evict | Serve | Refuse | Delete
