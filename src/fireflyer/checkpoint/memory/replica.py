"""Adapter that presents a save in the nodes' memory as a storage, so that it loads like a save on
disk."""

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fireflyer._native import crc32
from fireflyer._native.storage import read_checked
from fireflyer.checkpoint.memory.inventory import Stamp
from fireflyer.checkpoint.memory.keeper_link import KeeperLink
from fireflyer.errors import Corrupted, StorageError, WireError
from fireflyer.log import get_logger
from fireflyer.storage import Chunk, Range, read_each

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BATCH_BYTES = 32 << 20
"""Approximate number of bytes in one request."""

_log = get_logger("checkpoint")


class Source:
    """One holder of one rank's data: this node's memory or another node's keeper."""

    def __init__(self, link: KeeperLink, stamp: Stamp, rank: int) -> None:
        """Looks up the rank's data at a keeper.

        Raises:
            StorageError, WireError: if the keeper does not hold the data, or is gone.
        """
        self._link = link
        self._stamp = stamp
        self._rank = rank
        with link.busy:
            self.size, memory = link.find(stamp, rank)
        self._memory = memory
        self._mapped = None if memory is None else memory.view(self.size)

    @property
    def path(self) -> str | None:
        """Path of the memfd, valid while this object exists; None if another node holds the
        data."""
        return None if self._memory is None else f"/proc/self/fd/{self._memory.fd}"

    def fill(self, wanted: Sequence[tuple[int, memoryview]]) -> None:
        """Fills each buffer, starting at the given offset; does not verify the data.

        Raises:
            Corrupted: if the data ends before a buffer is full.
            WireError: if the other node is gone.
        """
        for offset, buffer in wanted:
            if offset + len(buffer) > self.size:
                raise Corrupted(f"the data ends at byte {self.size}, inside a needed range")
        if self._mapped is None:
            with self._link.busy:
                self._link.read(self._stamp, self._rank, wanted)
            return
        for offset, buffer in wanted:
            buffer[:] = self._mapped[offset : offset + len(buffer)]


def _memory(size: int, address: int) -> memoryview:
    """Returns a writable view of the memory at an address, which the caller must keep valid."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _first_wrong(
    wanted: Sequence[tuple[int, memoryview]], crcs: Sequence[int] | None
) -> int | None:
    pairs = enumerate(zip(wanted, crcs or (), strict=crcs is not None))
    return next((i for i, ((_, buffer), crc) in pairs if crc32(buffer) != crc), None)


Opening = Callable[[], Source]


class ReplicaStorage:
    """Read-only `Storage` of one save's manifest and data files. Thread-safe.

    If a holder of a rank's data is gone, or `read_checked` finds a wrong CRC32, the next holder is
    used.
    """

    def __init__(
        self,
        name: str,
        manifest: tuple[str, bytes],
        data: Mapping[str, Sequence[Opening]],
        close: Callable[[], None],
    ) -> None:
        """
        Args:
            name: for messages.
            manifest: file name and bytes of the manifest.
            data: for each data file, functions that look up the file at one holder each, the best
                holder first.
            close: called by `close`.
        """
        self._name = name
        self._manifest_name, self._manifest = manifest
        self._data = data
        self._sources: dict[str, list[Source | Opening]] = {
            file: list(openings) for file, openings in data.items()
        }
        self._lock = threading.Lock()
        self.close = close
        """Closes the connections to other nodes' keepers; call it after the last read."""

    def __str__(self) -> str:
        return self._name

    def size(self, name: str) -> int | None:
        if name == self._manifest_name:
            return len(self._manifest)
        if name not in self._data:
            return None
        return self._first(name).size or None  # a rank without bytes has no file, as on storage

    def stamp(self, name: str) -> str:
        return ""  # needs no version tag, because names of saves are never reused

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        size = self.size(name)
        if size is None:
            raise StorageError(f"{self}/{name} does not exist")
        end = size if length is None else min(size, offset + length)
        data = bytearray(max(0, end - offset))
        self.read_into(name, offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        size = self.size(name)
        if size is None:
            raise StorageError(f"{self}/{name} does not exist")
        if offset + len(buffer) > size:
            raise Corrupted(f"{self}/{name} ends at byte {size}, inside a needed range")
        if name == self._manifest_name:
            buffer[:] = self._manifest[offset : offset + len(buffer)]
            return
        self._fill(name, [(offset, buffer)], None)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        return read_each(self, ranges)

    def read_checked(
        self, names: Sequence[str], segments: "NDArray[np.int64]", crcs: "NDArray[np.uint32]"
    ) -> None:
        for number in sorted(set(segments[:, 0].tolist())):
            rows = (segments[:, 0] == number).nonzero()[0]
            mine = segments[rows]
            mine[:, 0] = 0
            try:
                if not self._read_own(names[number], mine, crcs[rows]):
                    self._read_others(names[number], mine.tolist(), crcs[rows].tolist())
            except StorageError as error:
                error.segment = int(rows[error.segment or 0])
                raise

    def _read_own(
        self, name: str, segments: "NDArray[np.int64]", crcs: "NDArray[np.uint32]"
    ) -> bool:
        """Reads with native code from this node's memory; returns False if the best remaining
        holder is another node."""
        wrong: int | None = None
        while True:
            source = self._first(name, wrong)
            if source.path is None:
                return False
            try:
                read_checked([source.path], segments, crcs)
                return True
            except StorageError as error:
                wrong = error.segment
                self._give_up(name, source, error)

    def _read_others(self, name: str, rows: list[list[int]], crcs: list[int]) -> None:
        first = 0
        while first < len(rows):
            filled, last = 0, first
            while last < len(rows) and filled < _BATCH_BYTES:
                filled += rows[last][2]
                last += 1
            wanted = [
                (offset, _memory(size, address)) for _, offset, size, address in rows[first:last]
            ]
            try:
                self._fill(name, wanted, crcs[first:last])
            except StorageError as error:
                error.segment = first + (error.segment or 0)
                raise
            first = last

    def list(self, name: str = "") -> list[str]:
        files = [self._manifest_name, *self._data]  # asks no holder, because a holder may be gone
        if not name:
            return sorted({file.split("/", 1)[0] for file in files})
        return sorted(file[len(name) + 1 :] for file in files if file.startswith(f"{name}/"))

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        raise self._read_only("write", name)

    def create(self, name: str, data: bytes) -> bool:
        raise self._read_only("create", name)

    def rename(self, old: str, new: str) -> None:
        raise self._read_only("rename", old)

    def delete(self, name: str) -> None:
        raise self._read_only("delete", name)

    def _read_only(self, action: str, name: str) -> StorageError:
        return StorageError(f"cannot {action} {name}: {self} is read-only")

    def _fill(
        self, name: str, wanted: Sequence[tuple[int, memoryview]], crcs: Sequence[int] | None
    ) -> None:
        """Fills the buffers from the first holder whose data passes all checks."""
        wrong: int | None = None
        while True:
            source = self._first(name, wrong)
            try:
                source.fill(wanted)
                wrong = _first_wrong(wanted, crcs)
                if wrong is None:
                    return
                offset, buffer = wanted[wrong]
                raise Corrupted(
                    f"the CRC32 of bytes {offset} to {offset + len(buffer)} does not match"
                )
            except (StorageError, WireError) as error:
                self._give_up(name, source, error)

    def _first(self, name: str, wrong: int | None = None) -> Source:
        """Returns the first holder that has the file; drops holders that do not, or are gone.

        Args:
            wrong: index of the segment that was damaged at the previous holder.

        Raises:
            StorageError: if the save has no such file.
            Corrupted: if no holder is left; the error's `segment` is `wrong`.
        """
        if name not in self._data:
            raise StorageError(f"{self}/{name} does not exist")
        with self._lock:
            while sources := self._sources[name]:
                head = sources[0]
                if isinstance(head, Source):
                    return head
                try:
                    sources[0] = head()
                except (StorageError, WireError) as error:
                    self._drop(name, error)
        lost = Corrupted(f"{self}/{name}: no intact replica is reachable")
        lost.segment = wrong
        raise lost

    def _give_up(self, name: str, source: Source, error: Exception) -> None:
        with self._lock:
            if self._sources[name][:1] == [source]:  # not yet dropped by another thread
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        _log.warning("%s/%s: %s", self, name, error)
        del self._sources[name][0]
