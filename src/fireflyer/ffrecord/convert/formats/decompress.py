"""Decompression of whole files."""

import bz2
import io
import os
import zlib
from typing import Any

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.formats.parquet import need
from fireflyer.ffrecord.convert.source import read_file

COMPRESSIONS = ("br", "bz2", "gz", "snappy", "zstd")


def decompressed(path: str | os.PathLike[str], kind: str, size: int) -> bytes:
    """Reads a file in one of `COMPRESSIONS`, e.g. "zstd" or "zstd:7", that holds `size` bytes.

    Raises:
        ConfigError: the kind is unknown, or the package for the kind is not installed.
        Corrupted: the file is damaged, or holds another number of bytes.
        StorageError: the file cannot be read.
    """
    name = kind.partition(":")[0]
    if name not in COMPRESSIONS:
        raise ConfigError(
            f"{path}: invalid compression {kind!r}: expected one of {', '.join(COMPRESSIONS)}"
        )
    module, distribution = _PACKAGES.get(name, ("", ""))
    package = need(module, f"reading {path}", distribution) if module else None
    data = read_file(path)
    try:
        found = _expand(name, package, data, size)
    except Exception as error:  # each package raises its own classes
        raise Corrupted(f"{path} is damaged: {error}") from error
    if len(found) != size:
        raise Corrupted(f"{path} does not hold the expected {size} bytes")
    return found


_PACKAGES = {
    "br": ("brotli", "brotli"),
    "snappy": ("snappy", "python-snappy"),
    "zstd": ("zstandard", "zstandard"),
}
"""Module and package of each compression outside the standard library."""


def _expand(name: str, package: Any, data: bytes, size: int) -> bytes:
    """Decompresses at most `size` + 1 bytes, if the package supports a limit."""
    if name in ("gz", "bz2"):
        stream = zlib.decompressobj(31) if name == "gz" else bz2.BZ2Decompressor()
        found = stream.decompress(data, size + 1)
        if len(found) <= size and not stream.eof:
            raise EOFError("it ends too early")
        return found
    if name == "zstd":
        with package.ZstdDecompressor().stream_reader(io.BytesIO(data)) as reader:
            return bytes(reader.read(size + 1))
    return bytes(package.decompress(data))
