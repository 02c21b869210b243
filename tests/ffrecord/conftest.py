"""The format once more, written independently, and helpers for the whole part."""

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Encode = Callable[[Sequence[bytes]], bytes]
Store = Callable[..., Path]


SYSTEM_CALLS = (
    *("open", "pwritev", "copy_file_range", "fsync", "fdatasync"),
    *("replace", "unlink", "ftruncate", "close"),
)
"""Those of the writers."""


def intercept(
    patch: Callable[[Any, str, Any], None], before: Callable[[str, tuple[Any, ...]], None]
) -> None:
    """Calls `before(name, arguments)` ahead of each system call of a writer."""

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            before(name, args)
            return real(*args, **more)

        return call

    for name in SYSTEM_CALLS:
        patch(os, name, wrapped(name, getattr(os, name)))


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


def page(content: bytes) -> bytes:
    """`content` behind its checksum, filled up with zeros to 4096 bytes under it."""
    padded = content.ljust(4092, b"\0")
    return struct.pack("<I", zlib.crc32(padded)) + padded


def encode_v2(commits: Sequence[Sequence[bytes]], align: int = 8, schema: bytes = b"") -> bytes:
    """The bytes of the v2 file that these commits, none but the first of them empty, leave behind."""

    def up(value: int, multiple: int) -> int:
        return (value + multiple - 1) // multiple * multiple

    rest = struct.pack("<IQQI", 2, align, len(schema), zlib.crc32(schema)).ljust(4084, b"\0")
    file = bytearray(b"\x89FFREC2\n" + struct.pack("<I", zlib.crc32(rest)) + rest + schema)
    slots = up(len(file), 4096)
    file += bytes(slots + 8192 - len(file))
    entries: list[bytes] = []
    runs: list[tuple[int, int, int]] = []
    for number, samples in enumerate(commits):
        for sample in samples:
            file += bytes(up(len(file), align) - len(file))
            where = (len(file), len(sample), len(sample), zlib.crc32(sample), 0)
            entries.append(struct.pack("<QQQII", *where))
            file += sample
        first = len(entries) - len(samples)
        while runs and len(f"{runs[-1][2]:b}") <= len(f"{len(entries) - first:b}"):
            first = runs.pop()[0]
        file += bytes(up(len(file), 4096) - len(file))
        if samples:
            runs.append((first, len(file), len(entries) - first))
        for at in range(first, len(entries), 127) if samples else ():
            part = entries[at : at + 127]
            file += page(struct.pack("<IQ16x", len(part), at) + b"".join(part))
        footer = struct.pack("<IQ", len(runs), number) + b"".join(
            struct.pack("<QQQ", *run) for run in runs
        )
        place = len(file)
        file += struct.pack("<I", zlib.crc32(footer)) + footer
        body = (0, number, place, len(footer) + 4, len(file), len(entries))
        slot = struct.pack("<IQQQQQ16x", *body)
        at = slots + 4096 * (number % 2)
        file[at : at + 64] = struct.pack("<I", zlib.crc32(slot)) + slot
    return bytes(file)


@pytest.fixture(name="encode_v2", scope="session")
def encode_v2_fixture() -> Callable[..., bytes]:
    """(commits, align=8, schema=b"") -> the bytes of their v2 file, sharing nothing with ours."""
    return encode_v2
