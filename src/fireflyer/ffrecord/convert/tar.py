"""Tar archives and webdataset shards, read by a small reader of our own.

ustar, GNU long names and pax headers; regular files only. Files of one sample stand together and share
their name up to the first dot (webdataset): `0001.jpg 0001.cls` is the row {key, jpg, cls}. The last part
of the suffix says the type: `cls` an integer in text, `txt` and `json` text, `npy` an array, else bytes.
"""

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.source import Column, Row, checked, reading

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_LONGEST_NAME = 1 << 16  # bytes of a name or of an extended header
_STEP = 1 << 20


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class TarSource:
    """One archive, plain or gzip."""

    length: int | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """
        Raises:
            ConfigError: no file in it.
            Corrupted, StorageError: as `rows`.
        """
        self.name = os.fspath(path)
        first = next(self._samples(), None)
        if first is None:
            raise ConfigError(f"{self.name}: the archive holds no files")
        self.columns = tuple(_column(name, first[name]) for name in first)

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        for number, sample in enumerate(self._samples()):
            where = f"{self.name}, sample {number} ({sample['key']!r})"
            yield checked(sample, self.columns, where)

    def _samples(self) -> Iterator[Row]:
        row: Row = {}
        for name, data in members(self.name):
            folder, _, base = name.rpartition("/")
            stem, dot, suffix = base.partition(".")
            key = f"{folder}/{stem}" if folder else stem
            field = suffix if dot and suffix != "key" else "data"
            if row and (key != row["key"]):
                yield row
                row = {}
            if field in row:
                raise ConfigError(f"{self.name}: two files are named {name!r}: rename one of them")
            row = row or {"key": key}
            row[field] = _decoded(data, field, f"{self.name}, file {name!r}")
        if row:
            yield row


def _column(name: str, value: Any) -> Column:
    if isinstance(value, np.ndarray):
        return Column(name, value.dtype.name, (None,) * value.ndim)
    return Column(name, "str" if isinstance(value, str) else "bytes")


def _decoded(data: bytes, field: str, where: str) -> Any:
    kind = field.rpartition(".")[2].lower()
    try:
        if kind in ("txt", "json"):
            return data.decode()
        if kind == "cls":
            return np.array(int(data.decode("ascii").strip()), np.int64)
        if kind == "npy":
            array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
            if array.dtype.kind not in "biufc":
                raise ValueError(f"an array of {array.dtype}")
            return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
    except (ValueError, OverflowError, EOFError, SyntaxError, TypeError, MemoryError) as error:
        raise Corrupted(f"{where} is not what its suffix says: {error}") from error
    return data


def members(path: str) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every regular file of an archive, in order.

    Raises:
        Corrupted: a damaged or cut archive, or something that is none.
        StorageError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(2)
            file.seek(0)
            if head != b"\x1f\x8b":
                yield from _members(file, path)
                return
            with gzip.open(file) as stream:
                yield from _members(stream, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Corrupted(f"{path}: the gzip stream is damaged or cut: {error}") from error
    except OSError as error:
        raise reading(path, error) from error


def _members(stream: _Readable, path: str) -> Iterator[tuple[str, bytes]]:
    place = 0
    name: str | None = None  # of the next file, where a header before it says so
    size: int | None = None
    while header := stream.read(_BLOCK):
        where = f"{path}, header at byte {place}"
        if header == _ZEROS:
            return
        plain_name, kind, stated = _header(header, where)
        length = stated if size is None or kind in b"LKxg" else size
        if kind in b"LKxg" and length > _LONGEST_NAME:
            raise Corrupted(f"{where}: a name of {length} bytes")
        data = _content(stream, length, where)
        place += _BLOCK + length + -length % _BLOCK
        if kind in b"L":
            name = data.rstrip(b"\0").decode(errors="replace")
        elif kind in b"x":
            found = _pax(data, where)
            name = found.get("path", name)
            size = _decimal(found["size"], where) if "size" in found else size
        elif kind not in b"Kg":
            if kind in b"0\0" and not (name or plain_name).endswith("/"):
                yield name or plain_name, data
            name = size = None
    if place == 0:
        raise Corrupted(f"{path}: the file is empty, not a tar archive")


def _header(header: bytes, where: str) -> tuple[str, bytes, int]:
    """(name, type, size) of a member."""
    if len(header) < _BLOCK:
        raise Corrupted(f"{where}: the archive is cut")
    stated = _octal(header[148:156], where)
    if stated != sum(header) - sum(header[148:156]) + 8 * 32:
        raise Corrupted(f"{where}: damaged, or not a tar archive")
    name = _text(header[:100])
    if header[257:262] == b"ustar" and header[345]:
        name = f"{_text(header[345:500])}/{name}"
    return name, header[156:157], _octal(header[124:136], where)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="replace")


def _octal(field: bytes, where: str) -> int:
    if field[0] == 0x80:  # base 256, for more than 8 GiB
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits:
        return 0
    if digits.strip(b"01234567"):
        raise Corrupted(f"{where}: damaged, or not a tar archive")
    return int(digits, 8)


def _decimal(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise Corrupted(f"{where}: {text[:40]!r} is no size")
    return int(text)


def _pax(data: bytes, where: str) -> dict[str, str]:
    """Records "LENGTH KEY=VALUE\\n"."""
    found: dict[str, str] = {}
    at = 0
    while at < len(data):
        digits, space, _ = data[at : at + 12].partition(b" ")
        length = _decimal(digits.decode("latin-1"), where) if space else 0
        record = data[at + len(digits) + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n") or at + length > len(data):
            raise Corrupted(f"{where}: a damaged extended header")
        found[key.decode(errors="replace")] = value[:-1].decode(errors="replace")
        at += length
    return found


def _content(stream: _Readable, length: int, where: str) -> bytes:
    """The bytes of a member; memory grows with what is there, not with what a header claims."""
    parts = []
    left = length + -length % _BLOCK
    while left:
        part = stream.read(min(left, _STEP))
        if not part:
            raise Corrupted(f"{where}: its {length} bytes are cut")
        parts.append(part)
        left -= len(part)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return data[:length]
