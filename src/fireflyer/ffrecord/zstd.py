"""Samples compressed by zstd, one frame each, with the package `zstandard` (the extra `zstd`)."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fireflyer.errors import ConfigError, Corrupted

if TYPE_CHECKING:
    import zstandard

PLAIN, ZSTD = 0, 1
ENTRY = np.dtype(
    [("place", "<i8"), ("bytes", "<i8"), ("raw", "<i8"), ("crc", "<u4"), ("codec", "<u4")]
)
"""Index entry of a sample: position of the stored bytes, their number, number of uncompressed
bytes, CRC32 of the stored bytes, and `PLAIN` or `ZSTD`."""
_PARALLEL = 4 << 20  # minimum number of decompressed bytes per thread

Bytes = npt.NDArray[np.uint8]


def compressor(level: int) -> "zstandard.ZstdCompressor":
    """Returns a compressor of frames that store the size of their content.

    Raises:
        ConfigError: the package is missing, or zstd has no such level.
    """
    package = _package()
    if not -7 <= level <= package.MAX_COMPRESSION_LEVEL:
        raise ConfigError(
            f"invalid zstd compression level {level}: expected -7 to {package.MAX_COMPRESSION_LEVEL}"
        )
    made: zstandard.ZstdCompressor = package.ZstdCompressor(level=level)
    return made


def expand(
    stored: Bytes,
    offsets: npt.NDArray[np.int64],
    entries: npt.NDArray[np.void],
    name_of: Callable[[int], str],
) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Decompresses the samples in `stored` at `offsets`; returns an arena and its offsets.

    Args:
        stored: uint8, the bytes of k samples, concatenated.
        offsets: k + 1 places in `stored`.
        entries: k index entries (ENTRY).
        name_of: names sample j of the batch in an error.

    Raises:
        Corrupted: a frame is invalid, or its content differs from the index.
        ConfigError: the package is missing.
    """
    packed = np.flatnonzero(entries["codec"] == ZSTD).tolist()
    if not packed:
        return stored, offsets
    package = _package()
    places = np.zeros(len(entries) + 1, np.int64)
    np.cumsum(entries["raw"], out=places[1:])
    arena = np.empty(int(places[-1]), np.uint8)
    source, target = offsets.tolist(), places.tolist()
    for j in np.flatnonzero(entries["codec"] == PLAIN).tolist():
        arena[target[j] : target[j + 1]] = stored[source[j] : source[j + 1]]

    def work(part: list[int]) -> None:
        decompressor = package.ZstdDecompressor(max_window_size=1 << 31)
        for j in part:
            frame = stored[source[j] : source[j + 1]].data
            size = target[j + 1] - target[j]
            try:
                # The decompressor allocates the size that the frame states, so this size must equal
                # the one in the index.
                if package.frame_content_size(frame) != size:
                    raise package.ZstdError("the size in its frame differs from the index")
                data = decompressor.decompress(frame, allow_extra_data=False)
            except package.ZstdError as error:
                raise Corrupted(
                    f"{name_of(j)} is damaged: {error}; write it again or restore it from a copy"
                ) from error
            arena[target[j] : target[j + 1]] = np.frombuffer(data, np.uint8)

    threads = min(len(os.sched_getaffinity(0)), len(packed), target[-1] // _PARALLEL)
    if threads <= 1:
        work(packed)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, [packed[start::threads] for start in range(threads)]))
    return arena, places


def _package() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "samples compressed by zstd need the package 'zstandard': pip install 'fireflyer[zstd]'"
        ) from error
    return zstandard
