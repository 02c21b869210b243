"""A save in the memory of nodes in the shape of a storage, so that it is loaded like one on disk."""

import bisect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from fireflyer.checkpoint import tierwire as wire
from fireflyer.checkpoint.keeperlink import KeeperLink
from fireflyer.checkpoint.tiers import Stamp
from fireflyer.errors import Corrupted, StorageError, WireError
from fireflyer.log import get_logger
from fireflyer.storage import Chunk, Range

_log = get_logger("checkpoint")


class Source:
    """One holder of one rank's data: the memory of this node, or another node's keeper."""

    def __init__(self, link: KeeperLink, stamp: Stamp, rank: int, who: str) -> None:
        """
        Raises:
            StorageError, WireError: if it does not hold it, or is gone.
        """
        self._link = link
        self._stamp = stamp
        self._rank = rank
        self.who = who
        with link.busy:
            described, memory = link.describe(stamp, rank)
        self.size = described.size
        self.blocks = described.blocks
        self._starts = [block.offset for block in described.blocks]
        self._mapped = None if memory is None else memory.view(self.size)
        self._right: set[int] = set()

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer`; every block that it touches is checked.

        Raises:
            Corrupted: if a CRC32 does not hold.
            WireError: if the other node is gone.
        """
        end = offset + len(buffer)
        first = max(0, bisect.bisect_right(self._starts, offset) - 1)
        if self._mapped is not None:
            for index in range(first, bisect.bisect_left(self._starts, end)):
                self._check(index, self._mapped)
            buffer[:] = self._mapped[offset:end]
            return
        buffer[:] = bytes(len(buffer))  # gaps
        for block in self.blocks[first : bisect.bisect_left(self._starts, end)]:
            start, stop = max(offset, block.offset), min(end, block.offset + block.length)
            if start >= stop:
                continue
            whole = stop - start == block.length
            data = buffer[start - offset : stop - offset] if whole else bytearray(block.length)
            view = memoryview(data)
            with self._link.busy:
                self._link.read_into(self._stamp, self._rank, block.offset, view)
            moved = wire.Block(0, block.length, block.crc32)
            wire.verify(view, [moved], f"rank {self._rank} at {self.who}, byte {block.offset}")
            if not whole:
                buffer[start - offset : stop - offset] = view[
                    start - block.offset : stop - block.offset
                ]

    def _check(self, index: int, mapped: memoryview) -> None:
        if index not in self._right:
            wire.verify(mapped, [self.blocks[index]], f"rank {self._rank} at {self.who}")
            self._right.add(index)


Opening = Callable[[], Source]


class ReplicaStorage:
    """A `Storage` that holds the manifest and the data files of one save; only for reading. Thread-safe.

    Where a holder of a rank's data is gone, or a CRC32 does not hold, the next holder is asked.
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
            manifest: its file name and bytes.
            data: by file name, where a rank's data may be found, the best place first.
            close: what `close` does.
        """
        self._name = name
        self._manifest_name, self._manifest = manifest
        self._data = data
        self._sources: dict[str, list[Source | Opening]] = {
            file: list(openings) for file, openings in data.items()
        }
        self._lock = threading.Lock()
        self.close = close
        """Lets go of other nodes' keepers; call it when everything has been read."""

    def __str__(self) -> str:
        return self._name

    def size(self, name: str) -> int | None:
        if name == self._manifest_name:
            return len(self._manifest)
        if name not in self._data:
            return None
        return self._first(name).size or None  # a rank without bytes has no file on storage either

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
        while True:
            source = self._first(name)
            try:
                return source.fill(offset, buffer)
            except (Corrupted, WireError) as error:
                self._give_up(name, source, error)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        answers: list[bytes | StorageError] = []
        for name, start, end in ranges:
            try:
                answers.append(self.read(name, start, end - start))
            except StorageError as error:
                answers.append(error)
        return answers

    def list(self, name: str = "") -> list[str]:
        files = [self._manifest_name, *(file for file in self._data if self.size(file))]
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
        return StorageError(f"cannot {action} {name}: {self} is only for reading")

    def _first(self, name: str) -> Source:
        """The holder in use.

        Raises:
            Corrupted: if there is none left.
        """
        with self._lock:
            while sources := self._sources[name]:
                head = sources[0]
                if isinstance(head, Source):
                    return head
                try:
                    sources[0] = head()
                except (StorageError, WireError) as error:
                    self._drop(name, error)
        raise Corrupted(f"{self}/{name}: no replica is left that is whole and within reach")

    def _give_up(self, name: str, source: Source, error: Exception) -> None:
        with self._lock:
            if self._sources[name][:1] == [source]:  # not yet by another thread
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        _log.warning("%s/%s: %s", self, name, error)
        del self._sources[name][0]
