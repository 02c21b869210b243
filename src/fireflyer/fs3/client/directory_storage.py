"""Storage protocol over a directory of fs3, for checkpoints and datasets."""

import builtins
import contextlib
import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from fireflyer._native import crc32
from fireflyer.errors import (
    Corrupted,
    FileError,
    FireflyerError,
    NoSpace,
    StorageError,
    Unavailable,
    WireError,
)
from fireflyer.fs3.client.file import File
from fireflyer.fs3.client.modes import BinaryMode
from fireflyer.fs3.meta.inode import Inode
from fireflyer.storage import TEMPORARY_SUFFIX, Chunk, Range

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_KEPT_OPEN = 256
"""Maximum number of files that `read_summed` keeps open; each costs only its inode."""
_counter = itertools.count()


class Files(Protocol):
    """The calls of a `Client` that the storage uses."""

    def open(self, path: str, mode: BinaryMode = "rb") -> File: ...
    def read_many(self, requests: Sequence[tuple[File, int, bytearray]]) -> list[int]: ...
    def read_rows(self, files: Sequence[File], rows: "NDArray[np.int64]") -> None: ...
    def read_summed(
        self, files: Sequence[File], rows: "NDArray[np.int64]", starts: Sequence[int]
    ) -> list[int]: ...
    def stat(self, path: str) -> os.stat_result: ...
    def inode(self, path: str) -> Inode: ...
    def makedirs(self, path: str, *, exist_ok: bool) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def link(self, old: str, new: str) -> None: ...
    def listdir(self, path: str) -> builtins.list[str]: ...
    def unlink(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...
    def close(self) -> None: ...


class Fs3Storage:
    """Implementation of `fireflyer.storage.Storage`. Thread-safe.

    A storage opened by its URL can be pickled, and reconnects in a forked child.
    """

    exclusive_create = True

    def __init__(
        self,
        client: Files,
        root: str,
        *,
        url: str = "",
        open_url: "Callable[[str], Fs3Storage] | None" = None,
    ) -> None:
        """Makes the directory if it is missing. `open_url` opens the storage of `url` again.

        Raises:
            StorageError: the directory cannot be made.
        """
        self._client_of_process, self._process = client, os.getpid()
        self._root, self._url, self._open_url = root.rstrip("/"), url, open_url
        self._open_files: dict[tuple[Files, str], File] = {}
        with _translated("make directory", root):
            client.makedirs(root, exist_ok=True)

    def __str__(self) -> str:
        return self._url or f"fs3:{self._root or '/'}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        if self._open_url is None:
            raise TypeError(
                "cannot pickle the storage of a client; open the storage by its URL instead"
            )
        return self._open_url, (self._url,)

    @property
    def _client(self) -> Files:
        if self._process != os.getpid() and self._open_url is not None:
            fresh = self._open_url(self._url)
            self._client_of_process, self._process = fresh._client_of_process, fresh._process
        return self._client_of_process

    def close(self) -> None:
        """Closes the client of a storage that was opened by its URL."""
        if self._url and self._process == os.getpid():
            self._client_of_process.close()

    def size(self, name: str) -> int | None:
        path = self._path(name)
        with _translated("look at", path):
            try:
                return self._client.stat(path).st_size
            except _ABSENT:
                return None

    def stamp(self, name: str) -> str:
        path = self._path(name)
        with _translated("look at", path):
            try:
                now = self._client.inode(path)
            except _ABSENT:
                return ""
        return f"{now.number}-{now.length}-{now.length_version}-{now.mtime}-{now.ctime}"

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        path = self._path(name)
        with _translated("read", path), self._client.open(path) as file:
            return file.pread(file.size if length is None else length, offset)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        path = self._path(name)
        with _translated("read", path), self._client.open(path) as file:
            count = file.pread_into(buffer, offset)
        if count < len(buffer):
            raise Corrupted(f"{path} ends at byte {offset + count}, inside a needed range")

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        files: dict[str, File | StorageError] = {}
        for name, _, _ in ranges:
            if name not in files:
                files[name] = self._found(name)
        answers: list[bytearray | StorageError] = []
        requests: list[tuple[File, int, bytearray]] = []
        for name, start, end in ranges:
            file = files[name]
            if isinstance(file, File):
                memory = bytearray(max(0, min(end, file.size) - start))
                requests.append((file, start, memory))
                answers.append(memory)
            else:
                answers.append(file)
        try:
            with _translated("read", self._root):
                counts = self._client.read_many(requests)
                for (_, _, memory), count in zip(requests, counts, strict=True):
                    del memory[count:]  # the file was truncated meanwhile
        except StorageError as error:
            return [answer if isinstance(answer, StorageError) else error for answer in answers]
        return [answer if isinstance(answer, StorageError) else bytes(answer) for answer in answers]

    def read_checked(
        self, names: Sequence[str], segments: "NDArray[np.int64]", crcs: "NDArray[np.uint32]"
    ) -> None:
        rows = segments.tolist()
        with contextlib.ExitStack() as opened, _translated("read", self._root or "/"):
            files = [opened.enter_context(self._client.open(self._path(name))) for name in names]
            for index, (which, offset, size, _) in enumerate(rows):
                if offset + size > files[which].size:
                    raise self._wrong(index, names[which], "it ends inside a needed range")
            self._client.read_rows(files, segments)
        for index, (which, offset, size, address) in enumerate(rows):
            memory = (ctypes.c_ubyte * size).from_address(address)
            if crc32(memory) != int(crcs[index]):
                why = f"the CRC32 of bytes {offset} to {offset + size} does not match"
                raise self._wrong(index, names[which], why)

    def read_summed(
        self, names: Sequence[str], rows: "NDArray[np.int64]", starts: Sequence[int]
    ) -> "list[int]":
        """Implements `fireflyer.storage.read_summed`."""
        client = self._client
        with _translated("read", self._root or "/"):
            files = [self._kept_open(client, name) for name in names]
            for which, offset, size, _ in rows.tolist():
                if offset + size > files[which].size:
                    raise Corrupted(f"{self._path(names[which])}: it ends inside a needed range")
            try:
                return client.read_summed(files, rows, starts)
            except FireflyerError:
                for name in names:  # a file that was kept open may have been removed
                    self._open_files.pop((client, name), None)
                raise

    def _kept_open(self, client: Files, name: str) -> File:
        """Opens a file, or returns it from the cache of open files. The caller guarantees that the
        file is never replaced."""
        file = self._open_files.get((client, name))
        if file is None:
            if len(self._open_files) >= _KEPT_OPEN:
                self._open_files.clear()
            file = self._open_files[client, name] = client.open(self._path(name))
        return file

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        path = self._path(name)
        temporary = path + _suffix()
        with _translated("write", path), self._new(temporary, path, chunks):
            self._client.rename(temporary, path)

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        temporary = path + _suffix()
        with _translated("create", path), self._new(temporary, path, [data]):
            try:
                self._client.link(temporary, path)
            except FileExistsError:
                return False
        return True

    def list(self, name: str = "") -> list[str]:
        path = self._path(name)
        with _translated("list", path):
            try:
                return sorted(self._client.listdir(path))
            except FileNotFoundError:
                return []

    def rename(self, old: str, new: str) -> None:
        source, target = self._path(old), self._path(new)
        with _translated("rename", source):
            self._client.makedirs(target.rpartition("/")[0] or "/", exist_ok=True)
            self._client.rename(source, target)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with _translated("delete", path):
            try:
                self._client.unlink(path)
            except IsADirectoryError:
                self._remove_empty(path)
            except _ABSENT:
                return

    def _remove_empty(self, path: str) -> None:
        try:
            self._client.rmdir(path)
        except FileError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise

    def _found(self, name: str) -> File | StorageError:
        """Opens a file for reading; returns an error in place of the file.

        The file needs no `close`, because a file that is only read has no session.
        """
        path = self._path(name)
        try:
            with _translated("read", path):
                return self._client.open(path)
        except StorageError as error:
            return error

    def _wrong(self, segment: int, name: str, why: str) -> Corrupted:
        error = Corrupted(f"{self._path(name)}: {why}")
        error.segment = segment
        return error

    @contextlib.contextmanager
    def _new(self, path: str, called: str, chunks: Iterable[Chunk]) -> Iterator[None]:
        """Writes a durable file under a temporary name, which is removed at the end.

        Args:
            path: temporary name.
            called: name in errors.
        """
        try:
            with self._create(path) as file:
                file.name = called
                for chunk in chunks:
                    file.write(chunk)
            yield
        finally:
            # Usually the rename has removed this name. Otherwise an error of the write matters more
            # than an error of this removal.
            with contextlib.suppress(FireflyerError):
                self._client.unlink(path)

    def _create(self, path: str) -> File:
        while True:
            try:
                return self._client.open(path, "xb")
            except FileNotFoundError:  # no folder, or another process removed it while empty
                self._client.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if name and (name.startswith("/") or any(part in ("", ".", "..") for part in parts)):
            raise ValueError(
                f"storage name {name!r} must be relative, without empty, '.' or '..' parts"
            )
        return f"{self._root}/{name}" if name else self._root or "/"


_ABSENT = (FileNotFoundError, NotADirectoryError)


def _suffix() -> str:
    return f".{os.getpid()}-{next(_counter)}{TEMPORARY_SUFFIX}"


@contextlib.contextmanager
def _translated(action: str, path: str) -> Iterator[None]:
    """Translates errors of the file system into errors of the storage protocol."""
    try:
        yield
    except FileError as error:
        kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
        raise kind(f"cannot {action} {path}: {error.strerror}") from error
    except WireError as error:
        raise Unavailable(f"cannot {action} {path}: {error}") from error
