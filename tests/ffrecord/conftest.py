"""The format once more, written independently, and helpers for the whole part."""

import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

Encode = Callable[[Sequence[bytes]], bytes]
Store = Callable[..., Path]


def encode(samples: Sequence[bytes]) -> bytes:
    n = len(samples)
    position = 12 + 12 * n
    offsets = []
    for sample in samples:
        offsets.append(position)
        position += len(sample)
    sums = struct.pack(f"<{n}I", *map(zlib.crc32, samples))
    metadata = struct.pack("<q", n) + sums + struct.pack(f"<{n}q", *offsets)
    return struct.pack("<I", zlib.crc32(metadata)) + metadata + b"".join(samples)


@pytest.fixture(name="encode", scope="session")
def encode_fixture() -> Encode:
    """samples -> the bytes of their v1 file, by ten lines that share nothing with ours."""
    return encode


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """(samples, name="a.ffr") -> path of a file that the independent writer made."""

    def write(samples: Sequence[bytes], name: str = "a.ffr") -> Path:
        path = tmp_path / name
        path.write_bytes(encode(samples))
        return path

    return write
