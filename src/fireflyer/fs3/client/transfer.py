"""Copies files and trees in parallel: into, out of or inside a file system.

A copy is written to a temporary file beside its target and renamed when it is complete. So a target
never holds a partial copy, and an interrupted copy leaves the old file. If the target is a symlink,
the file behind it is replaced. Holes stay holes. Pipes, FIFOs and devices of this machine are read
to their end, or written, in order.
"""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from secrets import token_hex
from typing import Protocol

from fireflyer.errors import (
    ConfigError,
    CorruptedFile,
    FileTimeout,
    FireflyerError,
    NoSpace,
    StorageError,
    Unavailable,
)
from fireflyer.fs3.client.connection import Client
from fireflyer.fs3.client.file import pieces
from fireflyer.storage import targets

PIECE = 4 << 20
"""Maximum size of a piece in bytes: a thread copies one piece at a time."""
THREADS = 6
"""Number of threads that copy pieces."""
_MOST_LINKS = 40
AHEAD = 2 * THREADS
"""Maximum number of pieces in flight."""


class Handle(Protocol):
    """Open file."""

    @property
    def size(self) -> int: ...

    def stretches(self, most: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges that may hold non-zero bytes, in no order: (offset, bytes).

        Ranges are split at multiples of `most`.
        """
        ...

    def pread_into(self, memory: memoryview, offset: int) -> int: ...

    def pwrite(self, data: memoryview, offset: int) -> int: ...

    def truncate(self, size: int) -> object: ...

    def close(self) -> None: ...


class End(Protocol):
    """Source or target of a copy. Thread-safe. Errors are OSErrors or FireflyerErrors."""

    def stat(self, path: str) -> os.stat_result: ...

    def lstat(self, path: str) -> os.stat_result: ...

    def followed(self, path: str) -> str:
        """Resolves the symlinks of a path; no file needs to exist there."""
        ...

    def is_stream(self, path: str) -> bool:
        """Returns whether the path is an open descriptor, pipe, FIFO or device."""
        ...

    def isdir(self, path: str) -> bool: ...

    def listdir(self, path: str) -> list[str]: ...

    def readlink(self, path: str) -> str: ...

    def symlink(self, target: str, path: str) -> None: ...

    def mkdir(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def reader(self, path: str) -> Handle: ...

    def writer(self, path: str, permissions: int, called: str) -> Handle:
        """Opens a new file; the umask applies to the permissions, and errors name the file
        `called`."""


class LocalHandle:
    """File of this machine, by its descriptor."""

    def __init__(self, path: str, flags: int, permissions: int = 0) -> None:
        self._path = path
        self._file = os.open(path, flags | os.O_CLOEXEC, permissions)

    @property
    def size(self) -> int:
        return os.fstat(self._file).st_size

    def stretches(self, most: int) -> Iterator[tuple[int, int]]:
        stop, size = 0, self.size
        while stop < size:
            try:
                begin = os.lseek(self._file, stop, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    return
                error.filename = self._path
                raise
            stop = os.lseek(self._file, begin, os.SEEK_HOLE)
            yield from pieces(begin, min(stop, size), most)

    def pread_into(self, memory: memoryview, offset: int) -> int:
        count = 0
        while count < len(memory):
            try:
                some = os.preadv(self._file, [memory[count:]], offset + count)
            except OSError as error:
                error.filename = self._path
                raise
            if not some:
                break
            count += some
        return count

    def pwrite(self, data: memoryview, offset: int) -> int:
        count = 0
        while count < len(data):
            count += os.pwrite(self._file, data[count:], offset + count)
        return count

    def truncate(self, size: int) -> None:
        os.ftruncate(self._file, size)

    def close(self) -> None:
        os.close(self._file)


class Local:
    """Files of this machine, as source or target of a copy."""

    stat = staticmethod(os.stat)
    lstat = staticmethod(os.lstat)
    is_stream = staticmethod(targets.is_stream)
    isdir = staticmethod(os.path.isdir)
    readlink = staticmethod(os.readlink)
    symlink = staticmethod(os.symlink)
    mkdir = staticmethod(os.mkdir)
    rename = staticmethod(os.replace)
    unlink = staticmethod(os.unlink)

    def followed(self, path: str) -> str:
        return targets.behind_links(path)

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def reader(self, path: str) -> LocalHandle:
        return LocalHandle(path, os.O_RDONLY)

    def writer(self, path: str, permissions: int, called: str) -> LocalHandle:
        return LocalHandle(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)


class Remote:
    """Files of an fs3 file system, as source or target of a copy."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.stat = client.stat
        self.lstat = client.lstat
        self.isdir = client.isdir
        self.listdir = client.listdir
        self.readlink = client.readlink
        self.symlink = client.symlink
        self.mkdir = client.mkdir
        self.rename = client.replace
        self.unlink = client.unlink

    def followed(self, path: str) -> str:
        for _ in range(_MOST_LINKS):
            try:
                if not stat.S_ISLNK(self.lstat(path).st_mode):
                    return path
            except FileNotFoundError:
                return path
            path = os.path.join(os.path.dirname(path), self.readlink(path))
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    def is_stream(self, path: str) -> bool:
        return False

    def reader(self, path: str) -> Handle:
        return self._client.open(path, "rb")

    def writer(self, path: str, permissions: int, called: str) -> Handle:
        file = self._client.open(path, "xb", permissions=permissions)
        file.name = called
        return file


@dataclass(frozen=True, slots=True)
class Item:
    """File, symlink or directory of a copy.

    Attributes:
        target: path of the copy, as errors name it.
        size: bytes of a file.
        mode: as in `os.lstat`.
        place: path behind the symlink `target`; "" if the copy replaces `target` itself.
        stream: True if source or target is a pipe, FIFO or device, so bytes are copied in order.
    """

    source: str
    target: str
    size: int
    mode: int
    place: str = ""
    stream: bool = False

    @property
    def renamed_to(self) -> str:
        return self.place or self.target


@dataclass(frozen=True, slots=True)
class Copied:
    """Result of a copy."""

    files: int
    bytes: int


def plan(source: End, path: str, target: End, to: str, *, recursive: bool) -> list[Item]:
    """Lists the files that a copy of `path` to `to` makes, directories before their contents.

    The function changes nothing. If `to` is a directory, the copy goes into that directory under the
    name of `path`.

    Raises:
        ConfigError: a directory without `recursive`; a FIFO, socket or device in a directory.
        OSError: there is no such path.
    """
    if target.isdir(to):
        name = os.path.basename(os.path.normpath(path))
        to = os.path.join(to, name) if name not in ("", ".", "..") else to
    items: list[Item] = []
    waiting = [(path, to)]
    while waiting:
        one, its = waiting.pop()
        found = source.stat(one) if one == path else source.lstat(one)
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFDIR:
            if not recursive:
                raise ConfigError(f"{one} is a directory: copy it with --recursive")
            names = source.listdir(one)
            waiting.extend((os.path.join(one, n), os.path.join(its, n)) for n in reversed(names))
            items.append(Item(one, its, 0, found.st_mode))
            continue
        if kind == stat.S_IFLNK:
            items.append(Item(one, its, 0, found.st_mode))
            continue
        streams = one == path and isinstance(source, Local) and kind != stat.S_IFSOCK
        if kind != stat.S_IFREG and not streams:
            raise ConfigError(f"{one} is neither a file nor a directory nor a symlink")
        out = target.is_stream(its)
        # To follow symlinks takes a lookup per file, which is cheap only on this machine.
        follow = not out and (one == path or isinstance(target, Local))
        place = target.followed(its) if follow else ""
        given = one == path and source.is_stream(one)
        stream = out or given or kind != stat.S_IFREG
        items.append(Item(one, its, found.st_size, found.st_mode, place, stream))
    return items


def copy(source: End, target: End, items: list[Item], advance: Callable[[int], None]) -> Copied:
    """Carries out a plan.

    Args:
        advance: callback that gets the number of bytes copied, with holes; any thread calls it.

    Raises:
        OSError, FireflyerError: the source or the target failed; the targets of unfinished copies
            are unchanged.
    """
    files: list[_Copy] = []  # files that may not be finished
    work = _work(source, target, items, files, advance)
    open_: list[_Copy] = []  # files with pieces that no thread has taken
    under_way: set[Future[_Copy | None]] = set()
    try:
        with ThreadPoolExecutor(THREADS, "fs3-copy") as threads:
            try:
                while True:
                    open_ = [file for file in open_ if file.more]
                    step = open_[0].step if open_ else next(work, None)
                    if step:
                        under_way.add(threads.submit(step))
                    elif not under_way:
                        break
                    if not step or len(under_way) >= AHEAD:
                        done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                        open_ += [file for one in done if (file := one.result())]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
    except BaseException:
        for file in files:
            file.undo()
        raise
    return Copied(sum(not stat.S_ISDIR(i.mode) for i in items), sum(i.size for i in items))


def _work(
    source: End,
    target: End,
    items: list[Item],
    files: "list[_Copy]",
    advance: Callable[[int], None],
) -> "Iterator[Callable[[], _Copy | None]]":
    """Makes directories and symlinks; yields the first step of each file.

    Adds each file to `files`, the list of files that may not be finished.
    """
    for item in items:
        if stat.S_ISDIR(item.mode):
            if not target.isdir(item.target):
                target.mkdir(item.target)
        elif stat.S_ISLNK(item.mode):
            beside = beside_of(item.target)
            with _naming(item.target, beside):
                target.symlink(source.readlink(item.source), beside)
                target.rename(beside, item.target)
        elif item.stream:
            # This runs in the caller's thread, so that Ctrl-C ends a wait for a pipe.
            _copy_stream(source, target, item, advance)
        else:
            file = _Copy(source, target, item, advance)
            files[:] = [one for one in files if not one.finished]
            files.append(file)
            yield file.begin


def _copy_stream(source: End, target: End, item: Item, advance: Callable[[int], None]) -> None:
    """Copies a file to a stream, or a stream into a file."""
    memory = memoryview(bytearray(PIECE))
    if target.is_stream(item.target):
        with (
            contextlib.closing(source.reader(item.source)) as reader,
            _naming(item.target, ""),
            open(targets.open_stream(item.target), "wb", buffering=0) as out,
        ):
            for offset in range(0, reader.size, PIECE):
                got = memory[: reader.pread_into(memory, offset)]
                advance(len(got))
                while got:
                    got = got[out.write(got) :]
        return
    beside = beside_of(item.renamed_to)
    stream = targets.open_stream(item.source, os.O_RDONLY)
    with open(stream, "rb", buffering=0) as pipe, _naming(item.target, beside):
        writer = target.writer(beside, 0o666, item.target)
        try:
            offset = 0
            while count := pipe.readinto(memory):
                writer.pwrite(memory[:count], offset)
                offset += count
                advance(count)
            writer.close()
            target.rename(beside, item.renamed_to)
        except BaseException:
            with contextlib.suppress(FireflyerError, OSError):  # the first error matters more
                writer.close()
            with contextlib.suppress(FireflyerError, OSError):
                target.unlink(beside)
            raise


def beside_of(path: str) -> str:
    """Returns a temporary path beside a path, for an incomplete file."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:200]}.{token_hex(4)}.part")


@contextlib.contextmanager
def _naming(path: str, beside: str) -> Iterator[None]:
    """Makes an OSError about the temporary file, or about no file, name `path`."""
    try:
        yield
    except (NoSpace, Unavailable, CorruptedFile, FileTimeout):  # their messages name the object
        raise
    except OSError as error:
        named = error.filename
        if named is None or os.path.basename(os.fsdecode(named)) == os.path.basename(beside):
            error.filename, error.filename2 = path, None
        raise


class _Copy:
    """Copy of one file: call `begin` once, then `step` from any thread while `more` is true.

    Attributes:
        finished: True once the complete file has its final name.
    """

    def __init__(
        self, source: End, target: End, item: Item, advance: Callable[[int], None]
    ) -> None:
        self.finished = False
        self._source, self._target, self._item, self._advance = source, target, item, advance
        self._beside = beside_of(item.renamed_to)
        self._lock = threading.Lock()  # guards the attributes below
        self._ends: tuple[Handle, Handle] | None = None
        self._made = False
        self._pieces: Iterator[tuple[int, int]] = iter(())
        self._next: tuple[int, int] | None = None
        self._under_way = 0
        self._copied = self._end = 0  # bytes copied, and the end of the last copied range

    @property
    def more(self) -> bool:
        """True if pieces are left that no thread has taken. Never becomes True again. Thread-safe."""
        return self._next is not None

    def begin(self) -> "_Copy | None":
        """Opens the file and copies a piece; returns `self` if more pieces are left.

        Errors name the final path.
        """
        with _naming(self._item.target, self._beside):
            self._begin()
        self.step()
        return self if self.more else None

    def step(self) -> None:
        """Copies a piece, if one is left; the last piece finishes the file."""
        with _naming(self._item.target, self._beside):
            self._step()

    def _begin(self) -> None:
        with self._lock:
            reader, _ = self._ends = self._open()
            if reader.size < self._item.size:
                raise self._shortened()
            self._pieces = reader.stretches(PIECE)
            self._find_next()
            if self._over():
                self._finish()

    def _step(self) -> None:
        with self._lock:
            if self._next is None or self._ends is None:
                return
            reader, writer = self._ends
            offset, size = self._next
            self._under_way += 1
            self._find_next()
        memory = memoryview(bytearray(size))
        if reader.pread_into(memory, offset) < size:
            raise self._shortened()
        writer.pwrite(memory, offset)
        self._advance(size)
        with self._lock:
            self._copied += size
            self._end = max(self._end, offset + size)
            self._under_way -= 1
            if self._over():
                self._finish()

    def _find_next(self) -> None:
        """Finds the next piece of the file within its planned size. REQUIRES: `_lock` is held."""
        total = self._item.size
        inside = ((at, min(size, total - at)) for at, size in self._pieces if at < total)
        self._next = next(inside, None)

    def _over(self) -> bool:
        return not (self.more or self._under_way)

    def _finish(self) -> None:
        """Completes the file and renames it. REQUIRES: `_lock` is held."""
        assert self._ends is not None
        reader, writer = self._ends
        if reader.size < self._item.size:
            raise self._shortened()
        if self._end < self._item.size:
            writer.truncate(self._item.size)
        self._ends = None
        with contextlib.closing(reader):
            writer.close()
        self._target.rename(self._beside, self._item.renamed_to)
        self.finished = True
        self._advance(self._item.size - self._copied)

    def _shortened(self) -> StorageError:
        return StorageError(f"{self._item.source} became shorter while it was copied")

    def _open(self) -> tuple[Handle, Handle]:
        reader = self._source.reader(self._item.source)
        try:
            permissions = stat.S_IMODE(self._item.mode) & 0o777
            writer = self._target.writer(self._beside, permissions, self._item.target)
            self._made = True
        except BaseException:
            reader.close()
            raise
        return reader, writer

    def undo(self) -> None:
        """Removes an unfinished file; call after all pieces have ended."""
        if self.finished or not self._made:
            return
        for end in self._ends or ():
            with contextlib.suppress(FireflyerError, OSError):
                end.close()
        with contextlib.suppress(FireflyerError, OSError):  # the first error matters more
            self._target.unlink(self._beside)
