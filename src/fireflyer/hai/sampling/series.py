"""Time series: points, their compact form, levels of resolution, and means. Pure.

A point has a value per metric, NaN if the value is missing. Points of one scope (a task, a node, a
user, the cluster) are stored in chunks of POINTS, at three levels: a minute, ten minutes, an hour.
A point of a higher level is the mean of the points that it covers on the lower level.
"""

import math
import struct
import zlib
from collections.abc import Iterable, Sequence

from fireflyer.errors import Corrupted

METRICS = (
    "held", "capacity", "queued", "running", "cpu", "memory", "read", "written", "received", "sent",
    "gpu", "gpu_memory", "step", "loss", "speed", "useful",
)  # fmt: skip
"""Metrics in the order of a point. held, capacity: GPUs (a node without GPUs counts 1); queued,
running: tasks; cpu: cores in use; memory, gpu_memory: bytes; read, written, received, sent: bytes a
second; gpu: load of the held GPUs, 0 to 1; step, loss: values of rank 0; speed: steps a second;
useful: share of held GPUs whose task is running, not starting or suspending."""

Point = tuple[float, ...]

EMPTY: Point = (math.nan,) * len(METRICS)

POINTS = 60
"""Number of points in a chunk."""

LEVELS = (60, 600, 3600)
"""Seconds between the points of each level."""

KEPT_S = {60: 2 * 86_400, 600: 60 * 86_400}
"""Seconds for which the chunks of a level are kept; the last level is kept forever."""


def point(**values: float) -> Point:
    """Returns a point with these metrics."""
    return tuple(float(values.get(name, math.nan)) for name in METRICS)


def chunk_begin(when: float, level: int) -> int:
    """Returns the begin of the chunk that contains a time, in seconds since 1970."""
    return int(when // (level * POINTS)) * level * POINTS


def place(when: float, level: int) -> int:
    """Returns the index, within its chunk, of the point that covers a time."""
    return int(when // level) % POINTS


def mean(points: Iterable[Point]) -> Point:
    """Returns the mean of each metric over the points that have a value; for `step` the last
    value."""
    columns = list(zip(*points, strict=True))
    if not columns:
        return EMPTY
    found: list[float] = []
    for name, column in zip(METRICS, columns, strict=True):
        there = [value for value in column if not math.isnan(value)]
        if not there:
            found.append(math.nan)
        else:
            found.append(there[-1] if name == "step" else math.fsum(there) / len(there))
    return tuple(found)


def pack(points: Sequence[Point]) -> bytes:
    """Returns the compact form of a chunk, as 32-bit floats, without metrics that have no value."""
    columns = list(zip(*points, strict=True))
    have = [at for at, column in enumerate(columns) if not all(map(math.isnan, column))]
    mask = sum(1 << at for at in have)
    values = [_narrow(value) for at in have for value in columns[at]]
    return zlib.compress(struct.pack(f"<II{len(values)}f", mask, len(points), *values), 6)


def unpack(data: bytes) -> list[Point]:
    """Returns the points of a chunk.

    Raises:
        Corrupted: the data is not a chunk.
    """
    try:
        raw = zlib.decompress(data)
        mask, count = struct.unpack_from("<II", raw)
        have = [at for at in range(len(METRICS)) if mask >> at & 1]
        values = struct.unpack_from(f"<{len(have) * count}f", raw, 8)
    except (zlib.error, struct.error) as error:
        raise Corrupted(f"cannot read a chunk of samples: {error}") from None
    empty = [math.nan] * count
    columns = [empty] * len(METRICS)
    for number, at in enumerate(have):
        columns[at] = list(values[number * count : (number + 1) * count])
    return list(zip(*columns, strict=True))


def _narrow(value: float) -> float:
    """Returns the value, limited to the range of a 32-bit float."""
    return math.copysign(3e38, value) if abs(value) > 3e38 else value


def choose_level(seconds: float) -> int:
    """Returns the finest level that keeps points for `seconds` and needs at most a few hundred of
    them."""
    if seconds <= 6 * 3600:
        return 60
    return 600 if seconds <= 4 * 86_400 else 3600


def thin(points: Sequence[Point], most: int) -> tuple[list[Point], int]:
    """Returns at most `most` points, each the mean of the same number of adjacent points, and that
    number."""
    size = max(1, -(-len(points) // most))
    return [mean(points[at : at + size]) for at in range(0, len(points), size)], size
