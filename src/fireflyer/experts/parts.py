"""Small parts of a store: statistics, waiting callers, jobs, and arguments."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.experts.events import Event
from fireflyer.experts.tensors import Expert
from fireflyer.experts.warm import LoadBuffer
from fireflyer.units import parse_size

TMPFS = Path("/dev/shm")


class Stats(msgspec.Struct, frozen=True):
    """Statistics of a store since it was opened. `tiers.Counts` describes the counters."""

    hot_hits: int
    warm_hits: int
    late: int
    misses: int
    loads: int
    prefetches: int
    evictions: int
    read_bytes: int
    """Bytes read from the folder."""
    read_s: float
    """Seconds spent on these reads."""
    warm_bytes: int
    """Bytes of warm memory in use, including loads in progress and other stores."""
    hot_bytes: int


class Ticket:
    """Request of a caller that waits for an expert."""

    def __init__(self) -> None:
        self.expert: Expert | None = None
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.expert is not None or self.error is not None


class Job(NamedTuple):
    """Work of the loader thread; `run` returns the event that tells the result."""

    name: str
    run: Callable[[], Event]
    buffer: LoadBuffer | None = None


def size_of(size: int | str) -> int:
    try:
        found = parse_size(size) if isinstance(size, str) else size
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if found < 1:
        raise ConfigError(f"invalid size {size}: expected a number of bytes above zero")
    return found


def default_folder(place: str | os.PathLike[str]) -> Path:
    text = os.fspath(place)
    if "://" not in text:
        text = os.path.realpath(text)
    key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    root = TMPFS if TMPFS.is_dir() else Path(tempfile.gettempdir())
    return root / f"fireflyer-experts-{os.geteuid()}-{key}"
