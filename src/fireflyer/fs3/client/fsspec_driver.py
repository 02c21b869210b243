"""Driver for fsspec: `fs3://HOST:PORT/PATH`, or `fs3:///PATH` in the file system of FIREFLYER_FS.

The methods call the client in the caller's thread; the asynchronous methods make the same calls in
other threads. See docs/guide/data/fs3-fsspec.md.
"""

import asyncio
import contextlib
import datetime
import io
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AbstractAsyncStreamedFile, AsyncFileSystem, get_loop
from fsspec.callbacks import DEFAULT_CALLBACK

from fireflyer.errors import FireflyerError
from fireflyer.fs3.client.connection import Client, connect
from fireflyer.fs3.client.data import Buffer
from fireflyer.fs3.client.discovery import find
from fireflyer.fs3.client.file import File
from fireflyer.fs3.client.modes import BUFFER_BYTES
from fireflyer.fs3.client.names import KINDS
from fireflyer.fs3.client.transfer import End, Item, Local, Remote, beside_of, copy
from fireflyer.fs3.meta.inode import DIRECTORY, FILE, SYMLINK, Inode

PREFIX = "fs3://"
THREADS = 16
"""Number of threads that remove the files of a tree; parallel removals share commits of the
metadata store."""
Info = dict[str, Any]
_CREATING = ("w", "a", "x")


class Fs3FileSystem(AsyncFileSystem):  # type: ignore[misc]  # untyped
    """File system of fs3 for fsspec. Thread-safe; a forked child connects again.

    Paths start at the root. A write creates the missing parents of its file. Methods raise
    OSError if an operation on a path fails, StorageError if contents cannot be read or written, and
    WireError if a service does not answer.

    Args:
        where: the folder of `fireflyer fs up --dir`, a cluster.toml, or HOST:PORT[,HOST:PORT...];
            default: the value of FIREFLYER_FS.
        secret_file: file with the cluster's secret; default: as in `fireflyer.fs3.connect`.
    """

    protocol = "fs3"
    root_marker = "/"

    def __init__(
        self, where: str | None = None, secret_file: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._pid: int = os.getpid()
        self.where, self.secret_file = where, secret_file
        self._connecting = threading.Lock()  # guards `_connection`
        self._connection: tuple[int, Client] | None = None  # process and its client

    # Connection

    @property
    def client(self) -> Client:
        """Client of this process; connects at its first use."""
        if self._connection is None or self._connection[0] != os.getpid():
            with self._connecting:
                if self._connection is None or self._connection[0] != os.getpid():
                    place = find(self.where)
                    secret_file = self.secret_file or place.secret_file
                    made = connect(place.addresses, secret_file=secret_file)
                    self._connection = os.getpid(), made
        return self._connection[1]

    @property
    def loop(self) -> Any:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._loop = None if self.asynchronous else get_loop()
            self._connecting = threading.Lock()
        return self._loop

    def close(self) -> None:
        """Closes the connection; the next call connects again."""
        with self._connecting:
            here, self._connection = self._connection, None
        if here is not None and here[0] == os.getpid():
            here[1].close()

    # URLs

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = os.fspath(path)
        if text.startswith(PREFIX):
            text = _split(text)[1]
        return "/" + text.strip("/")

    def unstrip_protocol(self, name: str) -> str:
        path = self._strip_protocol(name)
        where = self.where or ""
        servers = where if ":" in where and "/" not in where else ""
        return f"{PREFIX}{servers}{path}"

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        servers = _split(path)[0] if path.startswith(PREFIX) else ""
        return {"where": servers} if servers else {}

    # Reading names

    def info(self, path: str, **_: Any) -> Info:
        """Returns attributes of a path, following symlinks; "islink" is true for a symlink."""
        path = self._strip_protocol(path)
        own = self.client.inode(path, follow_symlinks=False)
        return self._described(path, own)

    def _described(self, path: str, own: Inode) -> Info:
        """Describes the name `path` of inode `own`. If `own` is a symlink and its target exists,
        the target's inode is described."""
        at, link = own, own.kind == SYMLINK
        if link:
            with contextlib.suppress(FileNotFoundError):
                at = self.client.inode(path)
        kind = {FILE: "file", SYMLINK: "link", DIRECTORY: "directory"}.get(at.kind, "other")
        described: Info = {
            "name": path,
            "size": 0 if at.kind == DIRECTORY else len(at.target) or at.length,
            "type": kind,
            "islink": link,
            "mode": KINDS[at.kind] | at.mode,
            "uid": at.uid,
            "gid": at.gid,
            "nlink": at.nlink,
            "ino": at.number,
            "created": at.btime / 1e9,
            "mtime": at.mtime / 1e9,
            "version": f"{at.number}-{at.length}-{at.length_version}-{at.mtime}-{at.ctime}",
        }
        if link:
            described["destination"] = os.fsdecode(own.target)
        return described

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Lists a directory, or the file itself. A symlink to a directory has type "link"."""
        path = self._strip_protocol(path)
        top = self.client.inode(path)
        if top.kind == DIRECTORY:
            found = list(self._entries(path, top.number))
        else:
            found = [self._described(path, top)]
        return found if detail else [one["name"] for one in found]

    def _entries(self, path: str, number: int) -> Iterator[Info]:
        for name, inode in self.client.entries_of(number):
            one = self._described(f"{path.rstrip('/')}/{name}", inode)
            if one["islink"] and one["type"] == "directory":
                one["type"] = "link"
            yield one

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **_: Any,
    ) -> Any:
        """Lists all files below a path, sorted by name; does not follow symlinks."""
        if maxdepth is not None and maxdepth < 1:
            raise ValueError(f"invalid maxdepth {maxdepth}: expected at least 1")
        path = self._strip_protocol(path)
        try:
            top = self.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return {} if detail else []
        found = {path: top} if withdirs or top["type"] != "directory" else {}
        waiting = [(path, top["ino"], 1)] if top["type"] == "directory" else []
        while waiting:
            above, number, depth = waiting.pop()
            for one in self._entries(above, number):
                directory = one["type"] == "directory"
                if not directory or withdirs:
                    found[one["name"]] = one
                if directory and (maxdepth is None or depth < maxdepth):
                    waiting.append((one["name"], one["ino"], depth + 1))
        names = sorted(found)
        return {name: found[name] for name in names} if detail else names

    def du(self, path: str, total: bool = True, maxdepth: int | None = None, **options: Any) -> Any:
        """Returns the total size of the files below a path, or each size if `total` is false."""
        found = self.find(path, maxdepth=maxdepth, detail=True, **options)
        sizes = {name: one["size"] for name, one in found.items()}
        return sum(sizes.values()) if total else sizes

    def glob(self, path: str, maxdepth: int | None = None, **options: Any) -> Any:
        return AbstractFileSystem.glob(self, path, maxdepth, **options)

    def expand_path(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, **options: Any
    ) -> Any:
        return AbstractFileSystem.expand_path(self, path, recursive, maxdepth, **options)

    def exists(self, path: str, **_: Any) -> bool:
        return self.client.exists(self._strip_protocol(path))

    def lexists(self, path: str, **_: Any) -> bool:
        try:
            self.client.lstat(self._strip_protocol(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def isdir(self, path: str) -> bool:
        return self.client.isdir(self._strip_protocol(path))

    def isfile(self, path: str) -> bool:
        return self.client.isfile(self._strip_protocol(path))

    def created(self, path: str) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.info(path)["created"], tz=datetime.UTC)

    def modified(self, path: str) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.info(path)["mtime"], tz=datetime.UTC)

    def ukey(self, path: str) -> str:
        """Returns a tag that changes with the file."""
        return str(self.info(path)["version"])

    # Changing names

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        path = self._strip_protocol(path)
        if create_parents:
            self.client.makedirs(path)
        else:
            self.client.mkdir(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.client.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def rmdir(self, path: str) -> None:
        self.client.rmdir(self._strip_protocol(path))

    def rm_file(self, path: str) -> None:
        """Removes a file or a symlink."""
        self.client.unlink(self._strip_protocol(path))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Removes files and empty directories; with `recursive`, also the contents of directories."""
        directories = []
        with ThreadPoolExecutor(THREADS, "fs3-rm") as threads:

            def removed(one: str) -> None:
                try:
                    self.client.unlink(one)
                except IsADirectoryError:
                    directories.append(one)

            found = self.expand_path(path, recursive=recursive, maxdepth=maxdepth)
            list(threads.map(removed, found))
        for one in sorted(directories, reverse=True):  # contents before their directory
            self.client.rmdir(one)

    def mv(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        **options: Any,
    ) -> None:
        """Renames a file or a directory atomically. If `path2` is a directory, the result is inside
        `path2`.

        For lists and patterns, fsspec's own method copies the files and removes the sources.
        """
        if isinstance(path1, list) or any(sign in str(path1) for sign in "*?[") or maxdepth:
            AbstractFileSystem.copy(self, path1, path2, recursive, maxdepth, on_error="raise")
            self.rm(path1, recursive=recursive, maxdepth=maxdepth)
            return
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        self.client.lstat(source)
        if str(path2).endswith("/") or self.client.isdir(target):
            target = f"{target.rstrip('/')}/{source.rpartition('/')[2]}"
        self._with_parents(target, lambda: self.client.rename(source, target))

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        """Creates an empty file or truncates a file; without `truncate`, only sets its times."""
        with self._created(self._strip_protocol(path), "wb" if truncate else "ab"):
            pass
        if not truncate:
            self.client.utime(self._strip_protocol(path))

    def _with_parents(self, path: str, made: Callable[[], Any]) -> Any:
        """Calls `made`; if a parent of the path is missing, makes the parents and retries."""
        try:
            return made()
        except FileNotFoundError:
            self.client.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)
            return made()

    # Bytes

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        **_: Any,
    ) -> Any:
        size = block_size or BUFFER_BYTES
        if mode[0] not in _CREATING:
            file = self.client.open(path, mode)
            assert isinstance(file, File)
            return io.BufferedRandom(file, size) if "+" in mode else io.BufferedReader(file, size)
        if not autocommit and mode[0] == "w":
            return _Uncommitted(self, path, size)
        file = self._created(path, mode)
        return io.BufferedRandom(file, size) if "+" in mode else io.BufferedWriter(file, size)

    def _created(self, path: str, mode: str) -> File:
        file = self._with_parents(path, lambda: self.client.open(path, mode))
        assert isinstance(file, File)
        return file

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Returns the bytes from `start` to `end`; negative numbers count from the file's end."""
        with self.client.open(self._strip_protocol(path), "rb") as file:
            begin, stop = _limits(file.size, start, end)
            return file.pread(max(0, stop - begin), begin)

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """Reads ranges of files in one batch. `max_gap` has no effect: ranges need no merging."""
        if not isinstance(paths, list):
            raise TypeError(f"paths must be a list, not {type(paths).__name__!r}")
        starts, ends = _each(starts, len(paths)), _each(ends, len(paths))
        if not len(paths) == len(starts) == len(ends):
            raise ValueError(f"{len(paths)} paths, {len(starts)} starts and {len(ends)} ends")
        with contextlib.ExitStack() as opened:
            files: dict[str, File | Exception] = {}
            for path in dict.fromkeys(paths):
                try:
                    file = self.client.open(self._strip_protocol(path), "rb")
                    files[path] = opened.enter_context(file)
                except (FireflyerError, OSError) as error:
                    files[path] = error
            found = self._read_ranges(files, list(zip(paths, starts, ends, strict=True)))
        bad = next((one for one in found if isinstance(one, Exception)), None)
        if bad is not None and on_error != "return":
            raise bad
        return found

    def _read_ranges(
        self, files: dict[str, File | Exception], ranges: list[tuple[str, Any, Any]]
    ) -> list[Any]:
        answers: list[Any] = []
        requests: list[tuple[File, int, Buffer]] = []
        for path, start, end in ranges:
            file = files[path]
            if isinstance(file, Exception):
                answers.append(file)
                continue
            begin, stop = _limits(file.size, start, end)
            answers.append(bytearray(max(0, stop - begin)))
            requests.append((file, begin, answers[-1]))
        try:
            counts = self.client.read_many(requests)
        except (FireflyerError, OSError) as error:
            return [one if isinstance(one, Exception) else error for one in answers]
        for (_, _, memory), count in zip(requests, counts, strict=True):
            del memory[count:]  # the file was truncated meanwhile
        return [one if isinstance(one, Exception) else bytes(one) for one in answers]

    def pipe_file(self, path: str, value: Buffer, mode: str = "overwrite", **_: Any) -> None:
        """Writes a whole file atomically: no reader finds a partial file."""
        path = self._strip_protocol(path)
        file = _Uncommitted(self, path, BUFFER_BYTES)
        try:
            file.write(value)
            file.close()
            if mode == "create":
                self.client.link(file.beside, path)
                self.client.unlink(file.beside)
            else:
                file.commit()
        except BaseException:
            file.discard()
            raise

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        self._transfer(Remote(self.client), source, Remote(self.client), target, DEFAULT_CALLBACK)

    def get_file(self, rpath: str, lpath: Any, callback: Any = DEFAULT_CALLBACK, **_: Any) -> None:
        if hasattr(lpath, "write"):
            lpath.write(self.cat_file(rpath))
            return
        os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
        source = self._strip_protocol(rpath)
        self._transfer(Remote(self.client), source, Local(), os.fspath(lpath), callback)

    def put_file(
        self,
        lpath: str,
        rpath: str,
        callback: Any = DEFAULT_CALLBACK,
        mode: str = "overwrite",
        **_: Any,
    ) -> None:
        target = self._strip_protocol(rpath)
        if mode == "create" and self.client.exists(target):
            raise FileExistsError(f"{target} exists")
        self._transfer(Local(), os.fspath(lpath), Remote(self.client), target, callback)

    def _transfer(self, source: End, path: str, target: End, to: str, callback: Any) -> None:
        """Copies one file atomically, or makes a directory."""
        if source.isdir(path):
            if isinstance(target, Local):
                os.makedirs(to, exist_ok=True)
            else:
                self.client.makedirs(to, exist_ok=True)
            return
        reader = source.reader(path)
        size = reader.size
        reader.close()
        callback.set_size(size)
        place, stream = target.followed(to), target.is_stream(to)
        item = Item(path, to, size, stat.S_IFREG | 0o666, place, stream)
        self._with_parents(to, lambda: copy(source, target, [item], callback.relative_update))

    # Asynchronous

    async def open_async(self, path: str, mode: str = "rb", **options: Any) -> "AsyncOpened":
        if "b" not in mode:
            raise ValueError(f"invalid mode {mode!r}: asynchronous files are binary; add 'b'")
        path = self._strip_protocol(path)
        return AsyncOpened(await asyncio.to_thread(self._open, path, mode, **options))


def _in_thread(name: str) -> Callable[..., Any]:
    async def method(self: Fs3FileSystem, *args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self, name), *args, **options)

    method.__name__ = f"_{name}"
    return method


for _name in (
    *("info", "ls", "find", "du", "exists", "isdir", "isfile", "mkdir", "makedirs", "rmdir"),
    *("rm_file", "rm", "mv", "cat_file", "cat_ranges", "pipe_file", "cp_file", "get_file"),
    *("put_file", "touch", "glob", "expand_path"),
):
    setattr(Fs3FileSystem, f"_{_name}", _in_thread(_name))


class _Uncommitted(io.BufferedWriter):
    """File that gets its name when fsspec's transaction commits it.

    Attributes:
        beside: temporary path of the file until the commit.
    """

    def __init__(self, fs: Fs3FileSystem, path: str, size: int) -> None:
        self._fs, self._place = fs, Remote(fs.client).followed(path)
        self.beside = beside_of(self._place)
        file = fs._created(self.beside, "xb")
        file.name = path
        super().__init__(file, size)

    def commit(self) -> None:
        self.close()
        self._fs.client.rename(self.beside, self._place)

    def discard(self) -> None:
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self._fs.client.unlink(self.beside)


class AsyncOpened(AbstractAsyncStreamedFile):  # type: ignore[misc]  # untyped
    """Open file for a coroutine."""

    def __init__(self, file: Any) -> None:
        self._file = file

    async def read(self, length: int = -1) -> bytes:
        return bytes(await asyncio.to_thread(self._file.read, length))

    async def write(self, data: Buffer) -> int:
        return int(await asyncio.to_thread(self._file.write, data))

    async def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    async def tell(self) -> int:
        return int(self._file.tell())

    async def close(self) -> None:
        await asyncio.to_thread(self._file.close)

    async def __aenter__(self) -> "AsyncOpened":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _split(url: str) -> tuple[str, str]:
    """Splits a URL into servers and path.

    An address has a port, so a first part without a colon belongs to the path: some libraries turn
    fs3:///a/b into fs3://a/b.
    """
    servers, _, path = url.removeprefix(PREFIX).partition("/")
    return (servers, path) if ":" in servers else ("", url.removeprefix(PREFIX))


def _limits(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Returns start and end of a range of a file; negative numbers count from its end."""
    begin, stop = start or 0, size if end is None else end
    begin = max(0, size + begin) if begin < 0 else begin
    stop = size + stop if stop < 0 else stop
    return begin, min(stop, size)


def _each(limits: Any, count: int) -> list[Any]:
    return list(limits) if isinstance(limits, Iterable) else [limits] * count
