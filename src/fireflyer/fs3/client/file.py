"""Open files."""

import errno
import io
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fireflyer import finalizer
from fireflyer._native.fs3.client import FileMap
from fireflyer.errors import FileError, FireflyerError
from fireflyer.fs3.client.data import Buffer, Data, Source, layout_of, memory_of
from fireflyer.fs3.client.metadata import Metadata, Pulse, integer, natural
from fireflyer.fs3.client.walk import LAST_INDEX
from fireflyer.fs3.meta.inode import Inode, too_big
from fireflyer.fs3.meta.messages import (
    OMIT,
    Append,
    Close,
    ExtendStripe,
    ReportLength,
    Stat,
    Truncate,
    Writing,
)
from fireflyer.log import get_logger

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class File(io.RawIOBase):
    """A file of fs3, in bytes and without a buffer of its own. Thread-safe but for its position.

    What a write has returned from is durable. Others see the length when it was reported: by `fsync`,
    `close`, `truncate`. A file opened after that has all of it (close-to-open).
    Threads may append to one open file. Of several that are open under one name the first to append is the
    only one to do so until it is closed: a write of the others raises EBUSY.
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
        self._appends = False
        self._turn = (
            threading.RLock()
        )  # held by what takes steps: appends, reports, cuts; before `_lock`
        self._lock = threading.Lock()  # guards what follows
        self._inode = inode
        self._position = 0
        self._end = inode.length  # as far as this file knows
        self._version = inode.length_version  # under which the end is known and will be reported
        self._written = OMIT  # the largest end since the last report
        self._lately = OMIT  # the same since `_adopt` began
        if handle:
            pulse.opened(handle, inode.number)
            finalizer.start()
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
            FileError: ESTALE: the file was removed, and they may have been with it.
        """
        return read_files(self._data, [self], [(0, offset, buffer)], self.name)[0]

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
            FileError: ESTALE, at the end: the file was removed, and some of what seem holes with it.
        """
        end, size = self.source().end, layout_of(self._inode).chunk_size
        if end <= size:  # no question is cheaper than its one chunk
            yield from pieces(0, end, most)
            return
        last = min((end - 1) // size, LAST_INDEX)
        missing = last + 1
        for indexes in self._data.standing(self._inode, self.name, last=last):
            missing -= len(indexes)
            for row in np.split(indexes, np.flatnonzero(np.diff(indexes) != 1) + 1):
                stop = min((int(row[-1]) + 1) * size, end)
                yield from pieces(int(row[0]) * size, stop, most)
        if missing:
            self.met([self._inode.number])

    def met(self, holes: Collection[int]) -> None:
        """After a read, with the inodes in which it met holes: learns whether this file was removed or cut.

        Chunks go after the last name, and after the last session: what was read before is sound if there is
        a name or a session afterwards.

        Raises:
            FileError: ESTALE: it was removed.
        """
        number = self._inode.number
        if number not in holes:
            return
        try:
            now = self._metadata.ask(Stat(number), Inode)
            if now.nlink == 0 and (handle := self._pulse.handle_of(number)):
                now = self._metadata.act(ExtendStripe(number, handle, 0), Inode)
            elif now.nlink == 0:
                raise FileError(errno.ENOENT)
        except FileError as error:
            if error.errno not in (errno.ENOENT, errno.EBADF):
                raise
            why = "it was removed while it was read"
            raise FileError(errno.ESTALE, self.name, why) from None
        with self._turn:
            if now.length_version > self._version:
                self._adopt(now)

    # Writing

    def write(self, data: Buffer, /) -> int:
        if not self._append:
            return self._write_at(data, self._position)
        with self._turn:  # the next append begins where this one ends
            self._appends = self._appends or self._begin_appending()
            return self._write_at(data, self._end)

    def _begin_appending(self) -> bool:
        """Where it does, this file is the only one that appends until it is closed, and knows the end.

        Raises:
            FileError: EBUSY: another one appends.
        """
        try:
            self._told(self._act(Append(self._inode.number, self._handle)))
        except FileError as error:
            if error.errno != errno.EBUSY:
                raise
            why = "it is open elsewhere, and appended to there; wait until that is closed"
            raise FileError(errno.EBUSY, self.name, why) from None
        return True

    def _write_at(self, data: Buffer, offset: int) -> int:
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
            self._lately = max(self._lately, end)

    def _widen(self, index: int) -> None:
        """Before the first chunk at index `dyn_stripe` or beyond is written: more chains may hold some."""
        with self._lock:
            inode = self._inode
        if index < inode.dyn_stripe or inode.dyn_stripe >= layout_of(inode).stripe:
            return
        call = ExtendStripe(inode.number, self._handle, index)
        self._told(self._act(call))

    # Length, position

    def truncate(self, size: int | None = None, /) -> int:
        length = self._position if size is None else natural(size, "size")
        self.target(length, 0)
        with self._turn:
            if self._written != OMIT:
                self._report()
            else:  # others may have made it longer, on more chains
                self._told(self._metadata.ask(Stat(self._inode.number), Inode))
            self._data.cut(self._inode, length, self.name)
            now = self._act(Truncate(self._inode.number, b"", length, self._handle))
            with self._lock:
                self._inode, self._version = now, now.length_version
                self._end, self._written = length, OMIT
        return length

    def fsync(self) -> None:
        """Reports the length: whoever opens the file now sees all that was written."""
        self._check_open()
        with self._turn:
            if self._written != OMIT:
                self._report()

    def _report(self, *, last: bool = False) -> None:
        """Until it is taken; `last`: ends the session, too. REQUIRES: the turn."""
        kind = Close if last else ReportLength
        while True:
            with self._lock:
                end, version = self._written, self._version
            now = self._act(kind(self._inode.number, self._handle, end, version))
            if end == OMIT or now.length_version == version:
                break
            self._adopt(now)
        self._told(now)
        with self._lock:
            if self._written == end:
                self._written = OMIT

    def _adopt(self, now: Inode) -> None:
        """The file was truncated by others. Its chunks beyond that length were written after the cut.

        REQUIRES: the turn. Raises StorageError, DeadlineExceeded: nothing was adopted.
        """
        with self._lock:
            self._lately = OMIT
        end = self._data.length(now, self.name) if self._handle else OMIT
        with self._lock:
            self._inode, self._version = now, now.length_version
            if self._handle:
                self._written = max(end, self._lately)
            self._end = max(now.length, end, self._lately)

    def _act(self, call: Writing) -> Inode:
        """A call with the handle.

        Raises:
            FileError: EBADF: the session has ended.
        """
        try:
            return self._metadata.act(call, Inode)
        except FileError as error:
            if error.errno != errno.EBADF:
                raise
            why = "nothing was heard of this client for too long, so its session ended"
            raise FileError(
                errno.EBADF, self.name, f"{why}; the file may lack the last writes"
            ) from None

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
                with self._turn:
                    self._report(last=True)
        finally:
            if self._handle:
                self._pulse.closed(self._handle)
            super().close()

    def __del__(self) -> None:
        """A file that was forgotten is closed soon after, as far as that works."""
        if getattr(self, "_handle", 0) and not self.closed and self._process == os.getpid():
            finalizer.later(self._close_forgotten)

    def _close_forgotten(self) -> None:
        try:
            self.close()
        except (FireflyerError, OSError) as error:
            get_logger("fs3").warning("%s was not closed: %s", self.name, error)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.name} is closed")

    def __repr__(self) -> str:
        return f"<fs3 file {self.name!r} mode={self.mode!r}{' closed' if self.closed else ''}>"


def read_files(
    data: Data,
    files: Sequence[File],
    requests: Sequence[tuple[int, int, Buffer]],
    what: str,
    deadline_s: float | None = None,
) -> list[int]:
    """Fills memory from files: (index of the file, offset, memory); as `Client.read_many`."""
    got = data.read([file.source() for file in files], requests, what, deadline_s)
    if not got.holes:
        return got.counts
    for file in files:
        file.met(got.holes)
    rows = zip(requests, got.counts, strict=True)
    return [min(count, max(0, files[n].size - offset)) for (n, offset, _), count in rows]


def pieces(begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of a range that is cut at multiples of `most`."""
    while begin < end:
        stop = min(begin - begin % most + most, end)
        yield begin, stop - begin
        begin = stop
