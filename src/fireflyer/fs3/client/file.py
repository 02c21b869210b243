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
from fireflyer.fs3.client.metadata import Metadata, SessionKeepAlive, integer, natural
from fireflyer.fs3.client.walk import LAST_INDEX
from fireflyer.fs3.meta.inode import Inode, too_big
from fireflyer.fs3.meta.messages import (
    OMIT,
    Append,
    Changes,
    Close,
    ExtendStripe,
    ReportLength,
    SetAttributes,
    Stat,
    Truncate,
    Writing,
)
from fireflyer.log import get_logger

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class File(io.RawIOBase):
    """Open file of fs3, in bytes and unbuffered. Thread-safe except for its position.

    A write is durable when it returns. Other clients see the new length after `fsync`, `close` or
    `truncate` has reported that length; a file that is opened later has all these bytes
    (close-to-open consistency). Several threads may append to one `File`. If a file is open several
    times, only the `File` that appends first may append, until that `File` is closed. Appends
    through another `File` raise EBUSY. `io.BufferedReader` and `io.TextIOWrapper` accept a `File`
    like any raw file.
    """

    def __init__(
        self,
        data: Data,
        metadata: Metadata,
        keep_alive: SessionKeepAlive,
        inode: Inode,
        name: str,
        *,
        readable: bool,
        handle: int,
        append: bool = False,
    ) -> None:
        """Makes the file; `handle` is the id of its write session, or 0 for a file that is only
        read.

        Raises:
            StorageError: the map from chunks to chains cannot be computed.
        """
        self._handle = 0  # 0 until there is a session to close
        self._process = os.getpid()
        self._map: FileMap = data.map_of(inode)
        self.name = name
        self.mode = ("ab" if append else "rb+" if readable else "wb") if handle else "rb"
        self._data, self._metadata, self._keep_alive = data, metadata, keep_alive
        self._readable, self._append = readable, append
        self._appends = False
        # Serializes appends, reports and truncation; taken before `_lock`.
        self._turn = threading.RLock()
        self._lock = threading.Lock()  # guards the attributes below
        self._inode = inode
        self._position = 0
        self._end = inode.length  # length in bytes, as known to this object
        self._version = inode.length_version  # version of the length to which `_end` belongs
        self._written = OMIT  # largest end written since the last report
        self._written_meanwhile = OMIT  # largest end written since `_adopt` began
        self._changes: Changes | None = None  # attributes that the next report sets
        if handle:
            keep_alive.opened(handle, inode.number)
            finalizer.start()
        self._handle = handle

    # Attributes

    @property
    def inode(self) -> Inode:
        """Inode as of the metadata service's last answer."""
        return self._inode

    @property
    def size(self) -> int:
        """Size in bytes, as known to this object."""
        return self._end

    @property
    def version(self) -> int:
        """Version of the length; grows when a client truncates the file."""
        return self._version

    @property
    def changes(self) -> Changes | None:
        """Attributes that the next report of the length also sets."""
        return self._changes

    def change(self, changes: Changes | None) -> None:
        """Replaces `changes`; REQUIRES: the file is open for writing."""
        with self._turn:
            self._changes = changes

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
        """Reads `size` bytes at `offset`, fewer only at the file's end. Keeps the position."""
        offset = natural(offset, "offset")
        memory = bytearray(max(0, min(natural(size, "size"), self._end - offset)))
        return memoryview(memory)[: self.pread_into(memory, offset)].tobytes()

    def pread_into(self, buffer: Buffer, offset: int) -> int:
        """Reads at `offset` into contiguous memory and returns the number of bytes read.

        Keeps the position.

        Raises:
            Corrupted: no replica has the bytes intact.
            DeadlineExceeded, StorageError: the bytes could not be read.
            FileError: ESTALE: the file was removed, and the bytes may have been removed with it.
        """
        return read_files(self._data, [self], [(0, offset, buffer)], self.name)[0]

    def source(self) -> Source:
        """Returns the source from which `Client.read_many` reads."""
        self._check_open()
        if not self._readable:
            raise io.UnsupportedOperation(f"{self.name} is not open for reading")
        return Source(self._map, self._end)

    def stretches(self, most: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges that may hold bytes other than zeros; other ranges are holes.

        Yields:
            (offset, bytes), split at multiples of `most` bytes, in no order.

        Raises:
            DeadlineExceeded, StorageError: the file's chains do not answer.
            FileError: ESTALE, after the last range: the file was removed, so an apparent hole may
                have held data.
        """
        end, size = self.source().end, layout_of(self._inode).chunk_size
        if end <= size:  # a query costs as much as the read of one chunk
            yield from pieces(0, end, most)
            return
        last = min((end - 1) // size, LAST_INDEX)
        missing = last + 1
        for indexes in self._data.existing_chunks(self._inode, self.name, last=last):
            missing -= len(indexes)
            for row in np.split(indexes, np.flatnonzero(np.diff(indexes) != 1) + 1):
                stop = min((int(row[-1]) + 1) * size, end)
                yield from pieces(int(row[0]) * size, stop, most)
        if missing:
            self.check_holes([self._inode.number])

    def check_holes(self, holes: Collection[int]) -> None:
        """Checks, after a read found holes, that this file was not removed.

        Chunks are removed only after the last name and the last session are gone. So if a name or a
        session exists after a read, the bytes that the read returned are valid.

        Args:
            holes: inodes of the files in which the read found holes.

        Raises:
            FileError: ESTALE: the file was removed.
        """
        number = self._inode.number
        if number not in holes:
            return
        try:
            now = self._metadata.ask(Stat(number), Inode)
            if now.nlink == 0 and (handle := self._keep_alive.handle_of(number)):
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
        """Makes this open file the only appender until it is closed; updates its length.

        Raises:
            FileError: EBUSY: another open file appends.
        """
        try:
            self._on_inode(self._call(Append(self._inode.number, self._handle)))
        except FileError as error:
            if error.errno != errno.EBUSY:
                raise
            why = "another open file appends to it; wait until that file is closed"
            raise FileError(errno.EBUSY, self.name, why) from None
        return True

    def _write_at(self, data: Buffer, offset: int) -> int:
        count = self.pwrite(data, offset)
        self._position = offset + count
        return count

    def pwrite(self, data: Buffer, offset: int) -> int:
        """Writes `data` at `offset`, durably; returns its size in bytes. Keeps the position.

        Raises:
            FileError: EFBIG: the range exceeds the largest possible file; nothing was written.
            NoSpace, DeadlineExceeded, StorageError: any part of `data` may have been written.
        """
        memory = memory_of(data)
        target = self.target(offset, memoryview(memory).nbytes)
        count = self._data.write([target], [(0, offset, memory)], self.name)
        if count:
            self.wrote(offset + count)
        return count

    def target(self, offset: int, size: int) -> FileMap:
        """Prepares a write of `size` bytes; returns the chunk map. Call `wrote` after the write."""
        self._check_open()
        if not self._handle:
            raise io.UnsupportedOperation(f"{self.name} is not open for writing")
        self.check_end(offset, size)
        if size:
            self._widen((offset + size - 1) // layout_of(self._inode).chunk_size)
        return self._map

    def check_end(self, offset: int, size: int) -> None:
        """Checks that the range fits into the largest possible file; raises EFBIG if not."""
        if natural(offset, "offset") + size > self._inode.length_max:
            raise too_big(self._inode, self.name)

    def wrote(self, end: int) -> None:
        """Records that bytes up to `end` were written."""
        with self._lock:
            self._end = max(self._end, end)
            self._written = max(self._written, end)
            self._written_meanwhile = max(self._written_meanwhile, end)

    def _widen(self, index: int) -> None:
        """Extends the stripe, the number of chains that the file uses, if the chunk `index` needs it.

        Must be called before the chunk is written.
        """
        with self._lock:
            inode = self._inode
        if index < inode.dyn_stripe or inode.dyn_stripe >= layout_of(inode).stripe:
            return
        call = ExtendStripe(inode.number, self._handle, index)
        self._on_inode(self._call(call))

    # Length, position

    def truncate(self, size: int | None = None, /) -> int:
        length = self._position if size is None else natural(size, "size")
        self.target(length, 0)
        with self._turn:
            if self._unreported:
                self._report()
            else:  # other clients may have extended the file onto more chains
                self._on_inode(self._metadata.ask(Stat(self._inode.number), Inode))
            self._data.cut(self._inode, length, self.name)
            now = self._call(Truncate(self._inode.number, b"", length, self._handle))
            with self._lock:
                self._inode, self._version = now, now.length_version
                self._end, self._written = length, OMIT
        return length

    def fsync(self) -> None:
        """Reports the length, so files that are opened later have all written bytes."""
        self._check_open()
        with self._turn:
            if self._unreported:
                self._report()

    @property
    def _unreported(self) -> bool:
        return self._written != OMIT or self._changes is not None

    def end_session(self) -> None:
        """Reports the length and ends the write session; afterwards the file is read-only.

        Raises the errors of `close`; after an error the session still exists.
        """
        self._check_open()
        with self._turn:
            if self._handle:
                self._report(last=True)
                self._keep_alive.closed(self._handle)
                self._handle = 0

    def refresh(self) -> Inode:
        """Fetches the attributes with the changes of other clients; returns them."""
        with self._turn:
            now = self._metadata.ask(Stat(self._inode.number), Inode)
            if now.length_version > self._version:
                self._adopt(now)
            else:
                self._on_inode(now)
        return now

    def _report(self, *, last: bool = False) -> None:
        """Reports the length until the service accepts it. REQUIRES: `_turn` is held.

        Args:
            last: True to end the session, too.
        """
        kind = Close if last else ReportLength
        number, handle, changes = self._inode.number, self._handle, self._changes
        while True:
            with self._lock:
                end, version = self._written, self._version
            if changes is None:
                now = self._call(kind(number, handle, end, version))
            else:
                now = self._call(SetAttributes(number, changes, handle, end, version, last))
            if end == OMIT or now.length_version == version:
                break
            self._adopt(now)
        self._on_inode(now)
        self._changes = None
        with self._lock:
            if self._written == end:
                self._written = OMIT

    def _adopt(self, now: Inode) -> None:
        """Adopts the inode of a file that another client truncated.

        Chunks beyond the inode's length were written after the truncation, so the new length
        includes them. REQUIRES: `_turn` is held.

        Raises:
            StorageError, DeadlineExceeded: the state of this file is unchanged.
        """
        with self._lock:
            self._written_meanwhile = OMIT
        end = self._data.length(now, self.name) if self._handle else OMIT
        with self._lock:
            self._inode, self._version = now, now.length_version
            if self._handle:
                self._written = max(end, self._written_meanwhile)
            self._end = max(now.length, end, self._written_meanwhile)

    def _call(self, call: Writing) -> Inode:
        """Sends a call that carries the handle.

        Raises:
            FileError: EBADF: the session has ended.
        """
        try:
            return self._metadata.act(call, Inode)
        except FileError as error:
            if error.errno != errno.EBADF:
                raise
            why = "the session expired, because no heartbeat of this client arrived in time"
            raise FileError(
                errno.EBADF, self.name, f"{why}; the file may lack the last writes"
            ) from None

    def _on_inode(self, inode: Inode) -> None:
        with self._lock:
            self._inode = inode
            self._end = max(self._end, inode.length)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._check_open()
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}.get(whence)
        if base is None:
            raise ValueError(f"invalid whence {whence}: expected 0, 1 or 2")
        self._position = natural(base + integer(offset, "offset"), "position")
        return self._position

    def tell(self) -> int:
        self._check_open()
        return self._position

    # Close

    def close(self) -> None:
        """Reports the length and ends the session. The file is closed even if this raises."""
        if self.closed:
            return
        if self._process != os.getpid():  # a copy in a forked child; the file is the parent's
            self._handle = 0
        try:
            if self._handle:
                with self._turn:
                    self._report(last=True)
        finally:
            if self._handle:
                self._keep_alive.closed(self._handle)
            super().close()

    def __del__(self) -> None:
        """Schedules the close of a file that was dropped while open; failures are logged."""
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
    """Reads like `Client.read_many`; requests: (index of the file, offset, memory)."""
    got = data.read([file.source() for file in files], requests, what, deadline_s)
    if not got.holes:
        return got.counts
    for file in files:
        file.check_holes(got.holes)
    rows = zip(requests, got.counts, strict=True)
    return [min(count, max(0, files[n].size - offset)) for (n, offset, _), count in rows]


def pieces(begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields (offset, bytes) of the range from `begin` to `end`, split at multiples of `most`."""
    while begin < end:
        stop = min(begin - begin % most + most, end)
        yield begin, stop - begin
        begin = stop
