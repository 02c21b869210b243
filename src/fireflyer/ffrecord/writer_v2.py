"""Writer of v2 files (docs/internals/ffrecord-v2.md): a sequence of atomic commits.

A commit appends its samples, its index pages and its footer, and syncs. Then it writes one of two
slots, chosen by the parity of the commit's number, and syncs. A slot gives the position of the
commit's footer. The first commit goes to a temporary file that is then renamed.
"""

import os
import struct
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fireflyer._native import crc32
from fireflyer._native.ffrecord import Reader
from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.columns import Columns, from_json, to_json
from fireflyer.ffrecord.output import Output, Tail
from fireflyer.ffrecord.zstd import ENTRY, PLAIN, ZSTD, compressor

if TYPE_CHECKING:
    import zstandard

DEFAULT_ALIGN = 8
_MAX_ALIGN = 1 << 20
_ZEROS = memoryview(bytes(_MAX_ALIGN))
_MAGIC = b"\x89FFREC2\n"
_PAGE = 4096
_PAGE_ENTRIES = 127
_PAGES_AT_ONCE = 4096
_INDEX_PAGE = np.dtype(
    [
        ("crc", "<u4"),
        ("used", "<u4"),
        ("first", "<i8"),
        ("zero", "V16"),
        ("entries", ENTRY, _PAGE_ENTRIES),
    ]
)
_ENTRY = struct.Struct("<3q2I")

Run = tuple[int, int, int]
"""Consecutive index pages: number of the first sample, position of the first page, number of samples."""
Entries = npt.NDArray[np.void]


class Version2:
    """Content of a v2 file, for `FileWriter`; not thread-safe.

    Invariants: bytes before `_keep` never change, except for the slot that does not hold the last
    commit; the last of `count` samples ends at the end of `_tail`.
    """

    def __init__(
        self, file: Output, columns: Columns | None, align: int, compression: str | None, level: int
    ) -> None:
        if compression not in (None, "zstd"):
            raise ConfigError(f"invalid compression {compression!r}: expected 'zstd' or None")
        self._compressor: zstandard.ZstdCompressor | None = (
            None if compression is None else compressor(level)
        )
        self.columns = columns
        self._file = file
        self._align = align
        self._commit = -1  # number of the last commit
        self._keep = 0  # end of the last commit, or of a commit that may have become valid
        self._committed = 0  # number of samples in the last commit
        self._runs: list[Run] = []
        self._slots = 0  # position of slot 0 in the file
        self._entries = bytearray()  # index entries of the samples after the last commit
        self._tail = Tail(file, 0)

    @classmethod
    def create(
        cls, target: str, columns: Columns | None, align: int, compression: str | None, level: int
    ) -> "Version2":
        if not DEFAULT_ALIGN <= align <= _MAX_ALIGN or align & (align - 1):
            raise ConfigError(f"invalid align {align}: expected a power of 2 from 8 to 1 MiB")
        schema = b"" if columns is None else to_json(columns)
        file = Output.temporary(target)
        try:
            body = cls(file, columns, align, compression, level)
            # The file is locked before it gets its name, so that no other writer can lock it first.
            file.lock()
            rest = struct.pack("<IQQI", 2, align, len(schema), crc32(schema)).ljust(
                _PAGE - 12, b"\0"
            )
            padded = schema.ljust(_up(len(schema), _PAGE), b"\0")
            file.write([_MAGIC, struct.pack("<I", crc32(rest)), rest, padded], 0)
            body._slots = _PAGE + len(padded)
            body._tail.end = body._slots + 2 * _PAGE
        except BaseException:
            file.discard()
            raise
        return body

    @classmethod
    def reopen(cls, target: str, compression: str | None, level: int) -> "Version2":
        file = Output.existing(target)
        try:
            reader = Reader([target], True)
            if reader.versions() != [2]:
                raise ConfigError(
                    f"record file '{target}' is v1, which cannot be extended: write it again with version=2"
                )
            align, commit, footer, end, samples, slot, torn, runs = reader.last_commit(0)
            try:
                columns = from_json(schema) if (schema := reader.schema(0)) else None
            except ValueError as error:
                raise Corrupted(f"record file '{target}' is damaged: {error}") from error
            body = cls(file, columns, align, compression, level)
            body._commit, body._committed, body._runs = commit, samples, runs
            body._keep = body._tail.end = end
            body._slots = slot - _PAGE * (commit % 2)
            if torn:
                # The slot of this commit is torn. The next commit overwrites the other slot, which
                # is the only intact one, so this slot is written again first.
                body._write_slot(commit, footer, end, samples)
            file.check_name()
            if os.fstat(file.fd).st_size > end:
                os.ftruncate(file.fd, end)
        except BaseException:
            file.close()
            raise
        return body

    @property
    def count(self) -> int:
        return self._committed + len(self._entries) // _ENTRY.size

    def add(self, parts: list[memoryview]) -> None:
        raw = sum(map(len, parts))
        codec = PLAIN
        if self._compressor is not None and raw:
            whole = parts[0] if len(parts) == 1 else b"".join(parts)
            packed = self._compressor.compress(whole)
            if len(packed) < raw:
                parts, codec = [memoryview(packed)], ZSTD
        checksum = 0
        for part in parts:
            checksum = crc32(part, checksum)
        size = sum(map(len, parts))
        before = self._tail.end
        place = _up(before, self._align)
        self._tail.add([_ZEROS[: place - before], *parts])
        self._entries += _ENTRY.pack(place, size, raw, checksum, codec)

    def commit(self) -> None:
        """Makes all samples durable. Without new samples, its only effect is that a new file gets
        its name."""
        if self._entries or self._commit < 0:
            self._write_commit()

    def close(self) -> None:
        self.commit()

    def discard(self) -> None:
        file = self._file
        try:
            if file.fd >= 0 and file.published and os.fstat(file.fd).st_size > self._keep:
                os.ftruncate(file.fd, self._keep)
        except OSError:
            # No reader sees bytes after the last commit, and the next writer removes them.
            pass
        finally:
            file.discard()

    def _write_commit(self) -> None:
        file = self._file
        file.check_name()
        self._tail.flush()
        commit = self._commit + 1
        samples = self.count
        runs, footer = self._write_index(_up(self._tail.end, _PAGE))
        body = struct.pack("<Iq", len(runs), commit) + b"".join(
            struct.pack("<3q", *r) for r in runs
        )
        file.write([struct.pack("<I", crc32(body)), body], footer)
        end = footer + 4 + len(body)
        if file.published:
            os.fdatasync(file.fd)
            # A replaced or deleted name is detected before the commit becomes valid.
            file.check_name()
            self._keep = end
            self._write_slot(commit, footer, end, samples)
        else:
            self._write_slot(commit, footer, end, samples, sync=False)
            self._keep = end
            file.publish()
        self._commit, self._committed, self._runs = commit, samples, runs
        self._tail.end = end
        self._entries.clear()

    def _write_index(self, place: int) -> tuple[list[Run], int]:
        """Writes the pages of the new run at `place`; returns all runs and the end of the pages.

        The new run absorbs the last run while that run's number of samples has at most as many bits
        as the new run's number. Therefore each run's number has fewer bits than the previous run's.
        So there are at most as many runs as bits in the number of samples. Whenever an index entry
        is rewritten, it moves to a run whose number has more bits.
        """
        runs = list(self._runs)
        first = self._committed
        while runs and runs[-1][2].bit_length() <= (self.count - first).bit_length():
            first = runs.pop()[0]
        if self.count == first:
            return runs, place
        runs.append((first, place, self.count - first))
        fresh = np.frombuffer(bytes(self._entries), ENTRY)
        # Old entries are read from the last commit, so their checksums are verified again.
        before = Reader([self._file.path], True) if first < self._committed else None
        step = _PAGES_AT_ONCE * _PAGE_ENTRIES
        for start in range(first, self.count, step):
            stop = min(start + step, self.count)
            part = fresh[max(start - self._committed, 0) : max(stop - self._committed, 0)]
            if before is not None and start < self._committed:
                old = np.arange(start, min(stop, self._committed), dtype=np.int64)
                part = np.concatenate([before.extents(old).view(ENTRY), part])
            pages = _index_pages(part, start)
            self._file.write([memoryview(pages)], place)
            place += len(pages)
        return runs, place

    def _write_slot(
        self, commit: int, footer: int, end: int, samples: int, sync: bool = True
    ) -> None:
        body = struct.pack("<I5q16x", 0, commit, footer, end - footer, end, samples)
        slot = struct.pack("<I", crc32(body)) + body
        place = self._slots + _PAGE * (commit % 2)
        if commit == 0:
            # The first commit writes the pages of both slots; all bytes after slot 0 are zeros.
            slot = slot.ljust(2 * _PAGE, b"\0")
        self._file.write([slot], place)
        if sync:
            os.fdatasync(self._file.fd)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _index_pages(entries: Entries, first: int) -> bytearray:
    """Returns the index pages of `entries`; the first entry is that of sample `first`."""
    count = len(entries)
    full, rest = divmod(count, _PAGE_ENTRIES)
    data = bytearray((full + (rest > 0)) * _PAGE)
    pages = np.frombuffer(data, _INDEX_PAGE)
    pages["used"] = _PAGE_ENTRIES
    pages["first"] = first + _PAGE_ENTRIES * np.arange(len(pages))
    pages["entries"][:full] = entries[: full * _PAGE_ENTRIES].reshape(full, _PAGE_ENTRIES)
    if rest:
        pages["used"][-1] = rest
        pages["entries"][-1, :rest] = entries[-rest:]
    view = memoryview(data)
    pages["crc"] = [crc32(view[at + 4 : at + _PAGE]) for at in range(0, len(data), _PAGE)]
    return data
