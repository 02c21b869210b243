"""Files in tar archives: ustar, GNU (long names, sparse files) and pax headers.

The content of a hard link is read at the link's target, which needs a seek. A compressed archive
with hard links is therefore rejected. All other members that are neither files nor folders are
rejected, because skipping one would silently lose a sample. Concatenated archives are read to the
end.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.source import reading

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_LONGEST_NAME = 1 << 16  # maximum bytes of a name or of an extended header
_LARGEST_SPARSE = 1 << 30  # maximum bytes of a sparse file; its holes take memory here
_STEP = 1 << 20

_FILES = b"0\07"
_EXTENSIONS = b"LKxgX"
_SKIPPED = b"5DV"  # folders, name lists of dumped folders, and volume labels
_OTHERS = {
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a FIFO",
    b"M": "the rest of a file of another volume",
}

_Map = list[tuple[int, int]]
"""(place in the file, size) of each stored section."""


def members(path: str) -> Iterator[tuple[str, bytes]]:
    """Yields (name, content) of every file of an archive, in order.

    Invalid UTF-8 in a name becomes surrogates, as in `os.fsdecode`, so different names stay
    different.

    Raises:
        ConfigError: a member that is neither a file nor a folder, or a hard link without a target.
        Corrupted: the archive is damaged or truncated, or the file is not an archive.
        StorageError: the archive cannot be read.
    """
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not packed:
                yield from _Archive(file, path, seekable=True).files()
                return
            with gzip.open(file) as stream:
                yield from _Archive(stream, path, seekable=False).files()  # type: ignore[arg-type]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Corrupted(f"{path}: the gzip stream is damaged or cut: {error}") from error
    except OSError as error:
        raise reading(path, error) from error


@dataclass(slots=True)
class _Entry:
    """Member of an archive: its header, and the extension headers before it.

    `place` is the position of the first of these headers in the archive.
    """

    place: int
    name: str = ""
    kind: bytes = b"0"
    size: int = 0
    link: str = ""
    holes: bytes = b""
    """Header of an old GNU sparse file."""
    pax: dict[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> int:
        """Number of bytes after the header; 0 for a folder, whose size field is ignored."""
        return 0 if self.kind == b"5" else self.size

    @property
    def sparse(self) -> bool:
        return self.kind == b"S" or any(key.startswith("GNU.sparse.") for key in self.pax)


class _Archive:
    """Reader of `stream` from its beginning; `place` is the current position."""

    def __init__(self, stream: BinaryIO, path: str, *, seekable: bool) -> None:
        self._stream, self._path, self._seekable = stream, path, seekable
        self.place = 0
        # Position of each file before `place`, by name; None until the first hard link needs it.
        self._places: dict[str, int] | None = None

    def files(self) -> Iterator[tuple[str, bytes]]:
        while entry := self.entry():
            where = f"{self._path}, header at byte {entry.place}"
            if entry.kind in _SKIPPED or (entry.kind in _FILES and entry.name.endswith("/")):
                self._skip(entry.stored, where)
                continue
            if entry.kind == b"1":
                data = self._linked(entry)
            elif entry.kind in _FILES or entry.kind == b"S":
                data = self.content(entry)
                if self._places is not None:
                    self._places[entry.name] = entry.place
            else:
                what = _OTHERS.get(entry.kind, f"a member of type {entry.kind!r}")
                raise ConfigError(
                    f"{self._path}: {entry.name!r} is {what}, not a file: leave it out of the "
                    "archive, or store what links point to (tar --dereference)"
                )
            yield entry.name, data

    def entry(self) -> _Entry | None:
        """Returns the next member, with its content unread; None at the end."""
        entry = _Entry(self.place)
        name: str | None = None
        while header := self._block():
            where = f"{self._path}, header at byte {self.place - len(header)}"
            if not header.strip(b"\0"):
                continue  # the end of an archive; another archive may follow
            plain_name, kind, size = _header(header, where)
            if kind not in _EXTENSIONS:
                entry.kind, entry.size, entry.holes = kind, size, header
                entry.name = entry.pax.get("GNU.sparse.name", name or plain_name)
                entry.link = entry.link or _text(header[157:257])
                if "size" in entry.pax:
                    entry.size = _decimal(entry.pax["size"], where)
                return entry
            if size > _LONGEST_NAME:
                raise Corrupted(f"{where}: invalid name of {size} bytes")
            data = self._bytes(size, where)
            if kind == b"L":
                name = data.rstrip(b"\0").decode(errors="surrogateescape")
            elif kind == b"K":
                entry.link = data.rstrip(b"\0").decode(errors="surrogateescape")
            elif kind in b"xX":
                entry.pax |= _pax(data, where)
                name = entry.pax.get("path", name)
                entry.link = entry.pax.get("linkpath", entry.link)
        if self.place == 0:
            raise Corrupted(f"{self._path}: the file is empty, not a tar archive")
        if name is not None or entry.pax or entry.link:
            raise Corrupted(f"{self._path}: the archive is cut after the name of a file")
        return None

    def content(self, entry: _Entry) -> bytes:
        where = f"{self._path}, header at byte {entry.place}"
        if not entry.sparse:
            return self._bytes(entry.size, where)
        if "GNU.sparse.offset" in entry.pax:
            raise ConfigError(
                f"{where}: sparse files of pax 0.0 are not supported: use another tar"
            )
        if entry.kind == b"S":
            found, length = self._old_map(entry.holes, where)
            data = self._bytes(entry.size, where)
        else:
            data = self._bytes(entry.size, where)
            stated = entry.pax.get("GNU.sparse.realsize", entry.pax.get("GNU.sparse.size", ""))
            length = _decimal(stated, where)
            if "GNU.sparse.map" in entry.pax:
                found = _pairs(entry.pax["GNU.sparse.map"].split(","), where)
            else:
                found, data = _leading_map(data, where)
        return _spread(data, found, length, where)

    def _old_map(self, header: bytes, where: str) -> tuple[_Map, int]:
        """Returns the sections of an old GNU sparse file, from its header and further blocks."""
        length = _octal(header[483:495], where)
        fields = [header[386 + 12 * i : 398 + 12 * i] for i in range(8)]
        more = header[482]
        while more:
            block = self._block()
            if len(block) < _BLOCK:
                raise Corrupted(f"{where}: the archive is cut")
            fields += [block[12 * i : 12 * i + 12] for i in range(42)]
            more = block[504]
        numbers = [str(_octal(each, where)) for each in fields if each.strip(b"\0 ")]
        return _pairs(numbers, where), length

    def _linked(self, entry: _Entry) -> bytes:
        if entry.size:
            raise ConfigError(
                f"{self._path}: invalid hard link {entry.name!r}: it has bytes of its own"
            )
        if not self._seekable:
            raise ConfigError(
                f"{self._path}: cannot resolve the hard link {entry.name!r} to {entry.link!r} in a "
                "compressed archive: decompress it (gunzip) first"
            )
        here = self.place
        if self._places is None:
            self._places = self._files_before(entry.place)
        if entry.link not in self._places:
            raise ConfigError(
                f"{self._path}: the hard link {entry.name!r} to {entry.link!r} has no target earlier in "
                "the archive"
            )
        self._places[entry.name] = self._places[entry.link]
        self._go(self._places[entry.link])
        target = self.entry()
        if target is None:
            raise Corrupted(f"{self._path}: it changed while it was read")
        data = self.content(target)
        self._go(here)
        return data

    def _files_before(self, end: int) -> dict[str, int]:
        places: dict[str, int] = {}
        self._go(0)
        while self.place < end and (entry := self.entry()) is not None and entry.place < end:
            if entry.kind in _FILES or entry.kind == b"S":
                places[entry.name] = entry.place
            if entry.kind == b"S":
                self._old_map(entry.holes, self._path)
            self._go(self.place + entry.stored + -entry.stored % _BLOCK)
        return places

    def _go(self, place: int) -> None:
        self._stream.seek(place)
        self.place = place

    def _block(self) -> bytes:
        block = self._stream.read(_BLOCK)
        self.place += len(block)
        return block

    def _skip(self, size: int, where: str) -> None:
        for _ in self._parts(size, where):
            pass

    def _bytes(self, size: int, where: str) -> bytes:
        """Returns the content; memory grows with the actual data, not with the stated size."""
        parts = list(self._parts(size, where))
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return data[:size]

    def _parts(self, size: int, where: str) -> Iterator[bytes]:
        left = size + -size % _BLOCK
        while left:
            part = self._stream.read(min(left, _STEP))
            if not part:
                raise Corrupted(f"{where}: its {size} bytes are cut")
            self.place += len(part)
            left -= len(part)
            yield part


def _header(header: bytes, where: str) -> tuple[str, bytes, int]:
    """Returns (name, type, size) of a member."""
    if len(header) < _BLOCK:
        raise Corrupted(f"{where}: the archive is cut")
    stated = _octal(header[148:156], where)
    if stated != sum(header) - sum(header[148:156]) + 8 * 32:
        raise Corrupted(f"{where}: damaged, or not a tar archive")
    name = _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:
        name = f"{_text(header[345:500])}/{name}"
    return name, header[156:157], _octal(header[124:136], where)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")


def _octal(field: bytes, where: str) -> int:
    if field[0] == 0x80:  # base 256, which tar uses from 8 GiB on
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits:
        return 0
    if digits.strip(b"01234567"):
        raise Corrupted(f"{where}: damaged, or not a tar archive")
    return int(digits, 8)


def _decimal(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise Corrupted(f"{where}: invalid size {text[:40]!r}")
    return int(text)


def _pax(data: bytes, where: str) -> dict[str, str]:
    """Parses records "LENGTH KEY=VALUE\\n"."""
    found: dict[str, str] = {}
    at = 0
    while at < len(data):
        digits, space, _ = data[at : at + 12].partition(b" ")
        length = _decimal(digits.decode("latin-1"), where) if space else 0
        record = data[at + len(digits) + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n") or at + length > len(data):
            raise Corrupted(f"{where}: damaged extended header")
        found[key.decode(errors="surrogateescape")] = value[:-1].decode(errors="surrogateescape")
        at += length
    return found


def _pairs(numbers: list[str], where: str) -> _Map:
    values = [_decimal(number, where) for number in numbers]
    if len(values) % 2:
        raise Corrupted(f"{where}: a damaged map of a sparse file")
    return list(zip(values[::2], values[1::2], strict=True))


def _leading_map(data: bytes, where: str) -> tuple[_Map, bytes]:
    """Splits a pax 1.0 sparse file into its map, lines of decimals, and the data after it."""
    count, at = _line(data, 0, where)
    if count > len(data) // 4:
        raise Corrupted(f"{where}: a damaged map of a sparse file")
    found: _Map = []
    for _ in range(count):
        place, at = _line(data, at, where)
        size, at = _line(data, at, where)
        found.append((place, size))
    return found, data[at + -at % _BLOCK :]


def _line(data: bytes, at: int, where: str) -> tuple[int, int]:
    """Returns the number in the line at `at`, and the position of the next line."""
    end = data.find(b"\n", at, at + 24)
    if end < 0:
        raise Corrupted(f"{where}: a damaged map of a sparse file")
    return _decimal(data[at:end].decode("latin-1"), where), end + 1


def _spread(data: bytes, found: _Map, length: int, where: str) -> bytes:
    """Builds a file of `length` bytes from its stored sections; the rest are zeros."""
    if length > _LARGEST_SPARSE:
        raise ConfigError(f"{where}: sparse file of {length} bytes: at most 1 GiB is supported")
    if sum(size for _, size in found) != len(data) or any(p + n > length for p, n in found):
        raise Corrupted(f"{where}: a damaged map of a sparse file")
    whole = bytearray(length)
    at = 0
    for place, size in found:
        whole[place : place + size] = data[at : at + size]
        at += size
    return bytes(whole)
