"""Open files."""

import io
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fireflyer._native.fs3.client import FileMap
from fireflyer.errors import FireflyerError
from fireflyer.fs3.client.data import Buffer, Data, Source, layout_of, memory_of
from fireflyer.fs3.client.metadata import Metadata, Pulse, integer, natural
from fireflyer.fs3.client.walk import LAST_INDEX
from fireflyer.fs3.meta.inode import Inode, too_big
from fireflyer.fs3.meta.messages import OMIT, Close, ExtendStripe, ReportLength, Stat, Truncate
from fireflyer.log import get_logger

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class File(io.RawIOBase):
    """A file of fs3, in bytes and without a buffer of its own. Thread-safe but for its position.

    What a write has returned from is durable. Others see the length when it was reported: by `fsync`,
    `close`, `truncate`. A file opened after that has all of it (close-to-open).
    `io.BufferedReader(file)` and `io.TextIOWrapper` take it as they take any raw file.
    """

    def __init__(
        self,
        data: Data,
        metadata: Metadata,
        pulse: Pulse,
        inode: Inode,
        name: str,
        *,
        readable: bool,
        handle: int,
        append: bool = False,
    ) -> None:
        """`handle`: 0, or of the session in which it is open for writing. Raises StorageError."""
        self._handle = 0  # until there is something to close
        self._process = os.getpid()
        self._map: FileMap = data.map_of(inode)
        self.name = name
        self.mode = ("ab" if append else "rb+" if readable else "wb") if handle else "rb"
        self._data, self._metadata, self._pulse = data, metadata, pulse
        self._readable, self._append = readable, append
        self._lock = threading.Lock()  # guards what follows
        self._inode = inode
        self._position = 0
        self._end = inode.length  # as far as this file knows
        self._written = OMIT  # the largest end since the last report
        if handle:
            pulse.opened()
        self._handle = handle

    # Attributes

    @property
    def inode(self) -> Inode:
        """As it was last told."""
        return self._inode

    @property
    def size(self) -> int:
        """Bytes, as far as this file knows."""
        return self._end

    def readable(self) -> bool:
        self._check_open()
        return self._readable

    def writable(self) -> bool:
        self._check_open()
        return self._handle != 0

    def seekable(self) -> bool:
        self._check_open()
        return True

    # Reading

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        view = memoryview(buffer).cast("B")
        count = self.pread_into(view, self._position)
        self._position += count
        return count

    def readall(self) -> bytes:
        data = self.pread(max(0, self._end - self._position), self._position)
        self._position += len(data)
        return data

    def pread(self, size: int, offset: int) -> bytes:
        """At most `size` bytes from `offset`; fewer only at the end. Leaves the position alone."""
        offset = natural(offset, "offset")
        memory = bytearray(max(0, min(natural(size, "size"), self._end - offset)))
        return memoryview(memory)[: self.pread_into(memory, offset)].tobytes()

    def pread_into(self, buffer: Buffer, offset: int) -> int:
        """Likewise, into contiguous memory; how many bytes it got.

        Raises:
            Corrupted: no replica has the bytes as they were written.
            DeadlineExceeded, StorageError: they could not be read.
        """
        return self._data.read([self.source()], [(0, offset, buffer)], self.name)[0]

    def source(self) -> Source:
        """What `Client.read_many` reads from."""
        self._check_open()
        if not self._readable:
            raise io.UnsupportedOperation(f"{self.name} is not open for reading")
        return Source(self._map, self._end)

    def stretches(self, most: int) -> Iterator[tuple[int, int]]:
        """Where the file may hold other bytes than zeros, as far as it reaches; what lies between are holes.

        Yields:
            (offset, bytes), cut at multiples of `most` bytes, in no order.

        Raises:
            DeadlineExceeded, StorageError: its chains do not say.
        """
        end, size = self.source().end, layout_of(self._inode).chunk_size
        if end <= size:  # no question is cheaper than its one chunk
            yield from pieces(0, end, most)
            return
        last = min((end - 1) // size, LAST_INDEX)
        for indexes in self._data.standing(self._inode, self.name, last=last):
            for row in np.split(indexes, np.flatnonzero(np.diff(indexes) != 1) + 1):
                stop = min((int(row[-1]) + 1) * size, end)
                yield from pieces(int(row[0]) * size, stop, most)

    # Writing

    def write(self, data: Buffer, /) -> int:
        with self._lock:
            offset = self._end if self._append else self._position
        count = self.pwrite(data, offset)
        self._position = offset + count
        return count

    def pwrite(self, data: Buffer, offset: int) -> int:
        """Writes all of it at `offset`, durably; how many bytes that were. Leaves the position alone.

        Raises:
            FileError: EFBIG: a file cannot have these bytes; nothing was written.
            NoSpace, DeadlineExceeded, StorageError: any part of it was written or not.
        """
        memory = memory_of(data)
        target = self.target(offset, memoryview(memory).nbytes)
        count = self._data.write([target], [(0, offset, memory)], self.name)
        if count:
            self.wrote(offset + count)
        return count

    def target(self, offset: int, size: int) -> FileMap:
        """Makes ready for a write of so many bytes; `wrote` must follow it."""
        self._check_open()
        if not self._handle:
            raise io.UnsupportedOperation(f"{self.name} is not open for writing")
        self.check_end(offset, size)
        if size:
            self._widen((offset + size - 1) // layout_of(self._inode).chunk_size)
        return self._map

    def check_end(self, offset: int, size: int) -> None:
        """Raises what `pwrite` does of bytes that a file cannot have."""
        if natural(offset, "offset") + size > self._inode.length_max:
            raise too_big(self._inode, self.name)

    def wrote(self, end: int) -> None:
        """Bytes up to there were written."""
        with self._lock:
            self._end = max(self._end, end)
            self._written = max(self._written, end)

    def _widen(self, index: int) -> None:
        """Before the first chunk at index `dyn_stripe` or beyond is written: more chains may hold some."""
        with self._lock:
            inode = self._inode
        if index < inode.dyn_stripe or inode.dyn_stripe >= layout_of(inode).stripe:
            return
        call = ExtendStripe(inode.number, self._handle, index)
        self._told(self._metadata.act(call, Inode))

    # Length, position

    def truncate(self, size: int | None = None, /) -> int:
        length = self._position if size is None else natural(size, "size")
        self.target(length, 0)
        if self._written != OMIT:
            self._report()
        else:  # others may have made it longer, on more chains
            self._told(self._metadata.ask(Stat(self._inode.number), Inode))
        if length <= self._end:
            self._data.cut(self._inode, length, self.name)
        call = Truncate(self._inode.number, b"", length, self._handle)
        self._told(self._metadata.act(call, Inode))
        with self._lock:
            self._end, self._written = length, OMIT
        return length

    def fsync(self) -> None:
        """Reports the length: whoever opens the file now sees all that was written."""
        self._check_open()
        if self._written != OMIT:
            self._report()

    def _report(self) -> None:
        with self._lock:
            end, version = self._written, self._inode.length_version
        call = ReportLength(self._inode.number, self._handle, end, version)
        self._told(self._metadata.act(call, Inode))
        with self._lock:
            if self._written == end:
                self._written = OMIT

    def _told(self, inode: Inode) -> None:
        with self._lock:
            self._inode = inode
            self._end = max(self._end, inode.length)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._check_open()
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}.get(whence)
        if base is None:
            raise ValueError(f"whence {whence} is none of 0, 1, 2")
        self._position = natural(base + integer(offset, "offset"), "position")
        return self._position

    def tell(self) -> int:
        self._check_open()
        return self._position

    # The end

    def close(self) -> None:
        """Reports the length and ends the session. A failure is raised; the file is closed all the same."""
        if self.closed:
            return
        if self._process != os.getpid():  # a copy in a forked child: the file is the parent's
            self._handle = 0
        try:
            if self._handle:
                with self._lock:
                    end, version = self._written, self._inode.length_version
                call = Close(self._inode.number, self._handle, end, version)
                self._metadata.act(call, Inode)
        finally:
            if self._handle:
                self._pulse.closed()
            super().close()

    def __del__(self) -> None:
        """A file that was forgotten is closed as far as that works."""
        if not getattr(self, "_handle", 0) or self.closed:
            return
        try:
            self.close()
        except (FireflyerError, OSError) as error:
            get_logger("fs3").warning("%s was not closed: %s", self.name, error)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.name} is closed")

    def __repr__(self) -> str:
        return f"<fs3 file {self.name!r} mode={self.mode!r}{' closed' if self.closed else ''}>"


def pieces(begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of a range that is cut at multiples of `most`."""
    while begin < end:
        stop = min(begin - begin % most + most, end)
        yield begin, stop - begin
        begin = stop
