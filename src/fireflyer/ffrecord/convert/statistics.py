"""Summary of record files: counts, sizes, columns, lengths of samples."""

from collections.abc import Sequence

import msgspec
import numpy as np

from fireflyer.ffrecord.convert.formats.records import Kind, RecordSource, is_compressed, lengths
from fireflyer.ffrecord.convert.source import Column
from fireflyer.ffrecord.remote import Reader

SAMPLED = 1 << 20
"""Maximum number of samples in length statistics."""


class Lengths(msgspec.Struct, frozen=True):
    """Statistics of sample lengths in bytes, from at most SAMPLED evenly spread samples."""

    min: int
    median: int
    mean: float
    p95: int
    max: int


class Listed(msgspec.Struct, frozen=True):
    """Summary of one record file."""

    file: str
    samples: int
    bytes: int
    """Size of the file."""
    version: int
    holds: Kind
    compressed: bool
    columns: list[dict[str, object]]
    lengths: Lengths | None
    """Length statistics; None for a file without samples."""


def describe_file(name: str) -> Listed:
    """Opens a file and summarises its index; raises what `open_records` does."""
    source = RecordSource(name)
    with source.reader as reader:
        return Listed(
            file=name,
            samples=source.length or 0,
            bytes=reader.sizes()[0],
            version=source.version,
            holds=source.kind,
            compressed=is_compressed(reader),
            columns=[
                {"name": column.name, "dtype": column.written, "shape": list(column.shape)}
                for column in source.columns
            ],
            lengths=of_lengths(some_lengths(reader)),
        )


def some_lengths(reader: Reader) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Returns the bytes of every sample, or of SAMPLED evenly spread samples."""
    if reader.n <= SAMPLED:
        return lengths(reader)
    return lengths(reader, np.arange(SAMPLED) * reader.n // SAMPLED)


def columns_text(listed: Listed) -> str:
    found = []
    for column in listed.columns:
        shape = column["shape"]
        assert isinstance(shape, list)
        found.append(f"{column['name']}: {Column('', str(column['dtype']), tuple(shape)).text}")
    return ", ".join(found)


def of_lengths(sizes: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Lengths | None:
    if not len(sizes):
        return None
    median, p95 = np.quantile(sizes, (0.5, 0.95), method="nearest")
    return Lengths(int(sizes.min()), int(median), float(sizes.mean()), int(p95), int(sizes.max()))


def histogram(
    sizes: np.ndarray[tuple[int, ...], np.dtype[np.int64]], bars: int = 32
) -> tuple[list[int], Sequence[float]]:
    """Returns the number of samples in each bar, and the `bars` + 1 edges of the bars in bytes."""
    counts, edges = np.histogram(sizes, bars)
    return counts.tolist(), edges.tolist()


def size_text(size: float) -> str:
    """Formats a size, e.g. "812 B", "65.3 KiB", "1.24 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
