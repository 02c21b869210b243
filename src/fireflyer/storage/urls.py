"""Storage by path or URL: local directories, installed packages, and file systems of fsspec."""

import ctypes
import importlib.metadata
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fireflyer._native import crc32
from fireflyer.errors import (
    ConfigError,
    Corrupted,
    FireflyerError,
    StorageError,
    Unavailable,
    WireError,
)
from fireflyer.storage.directory import DirectoryStorage
from fireflyer.storage.protocol import (
    Chunk,
    Range,
    Storage,
    checked_name,
    failure_of,
    temporary_name,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ENTRY_POINTS = "fireflyer.storage"
"""Group of entry points; each maps a URL scheme to a function that opens a Storage."""

_PERMANENT = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(NotImplementedError, ValueError, TypeError),
)

_PASSING = (408, 425, 429)
"""HTTP statuses below 500 that are retryable."""
_GONE = (404, 410)
_PAST_THE_END = 416

_STAMPS = (
    *("ETag", "etag", "Content-MD5", "Digest", "md5Hash", "generation", "VersionId", "version_id"),
    *("mtime", "Last-Modified", "LastModified", "last_modified", "modificationTime", "modified"),
    *("updated", "created", "ino"),
)
"""Keys with which fsspec drivers report a file's version or modification time."""

_EXCLUSIVE = ("memory",)
"""Schemes of in-process file systems, in which the lock `_CREATING` makes `create` exclusive."""
_CREATING = threading.Lock()
"""Lock of `create` in an in-process file system, whose driver checks and then writes."""

_BATCH_BYTES = 32 << 20
"""Bytes per request of a checked read from fsspec."""


def open_storage(place: str | os.PathLike[str]) -> Storage:
    """Opens the storage of a path or URL.

    A path or file:// URL opens a directory, which is created if it is missing. An installed package
    may handle a scheme (fs3://) by an entry point of the group `fireflyer.storage`. fsspec handles
    all other URLs.
    """
    text = os.fspath(place)
    scheme, is_url, rest = text.partition("://")
    if not is_url or scheme == "file":
        return DirectoryStorage(Path(rest if is_url else text))
    return storage_at(text)


def storage_at(url: str) -> Storage:
    """Opens the storage of a URL with an installed package or fsspec; creates nothing.

    Raises:
        ConfigError: the URL is invalid for its scheme.
        Unavailable: no server answers.
    """
    for offered in _offered(url.partition("://")[0]):
        try:
            storage: Storage = offered.load()(url)
        except WireError as error:
            raise Unavailable(f"cannot open {url}: {error}") from error
        return storage
    return FsspecStorage(url)


def split_url(url: str, *, directory: bool = False) -> tuple[str, str]:
    """Splits the URL of a file, or of a `directory`, into the URL of a storage and a name in it.

    A URL of an installed package names a cluster and a path: fs3://HOST:PORT/PATH, or fs3:///PATH
    for the cluster of the environment. Its storage is the whole cluster, so that files of all
    directories share a client. For any other scheme the storage is the file's directory.
    """
    scheme, _, rest = url.partition("://")
    if _offered(scheme):
        cluster, _, path = rest.partition("/")
        return f"{scheme}://{cluster}/", "/".join(part for part in path.split("/") if part)
    if directory:
        return url, ""
    parent, slash, name = rest.rpartition("/")
    return f"{scheme}://{parent or slash}", name


def _offered(scheme: str) -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=ENTRY_POINTS, name=scheme)


class FsspecStorage:
    """Storage in a file system of fsspec.

    A file appears atomically if the file system's own move or put is atomic (object stores,
    memory). Concurrent `create` calls are safe if `exclusive_create` is True; otherwise `create`
    checks and then writes. The pickled form is the URL; a forked child reconnects.
    """

    def __init__(self, url: str) -> None:
        """Connects to the file system.

        Raises:
            ConfigError: fsspec does not know the URL's scheme, or lacks the package for it.
        """
        self._url = url
        self.exclusive_create = url.partition("://")[0] in _EXCLUSIVE
        self._connect()

    def _connect(self) -> None:
        import fsspec.core  # deferred: most programs never need it

        try:
            self._system, root = fsspec.core.url_to_fs(self._url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"cannot use {self._url}: {error}") from error
        self._root = str(root).rstrip("/")
        self._process = os.getpid()

    @property
    def _fs(self) -> Any:
        if self._process != os.getpid():
            self._connect()  # the parent keeps its connections and event loop
        return self._system

    def __reduce__(self) -> tuple[type["FsspecStorage"], tuple[str]]:
        return type(self), (self._url,)

    def __str__(self) -> str:
        return self._url

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked_name(name)}" if name else self._root

    def size(self, name: str) -> int | None:
        path = self._path(name)
        try:
            size = self._fs.size(path)
        except FileNotFoundError as error:
            if (cause := _hidden(error)) is None:
                return None
            raise _unread(path, cause, "open") from error
        except Exception as error:  # drivers raise their own classes
            raise _unread(path, error) from error
        if size is None:
            raise StorageError(f"cannot read {path}: its server does not report the size")
        return int(size)

    def stamp(self, name: str) -> str:
        path = self._path(name)
        try:
            self._fs.invalidate_cache(path)  # drop earlier listings
            info = self._fs.info(path)
        except FileNotFoundError as error:
            if (cause := _hidden(error)) is None:
                return ""
            raise _unread(path, cause, "open") from error
        except Exception as error:  # drivers raise their own classes
            raise _unread(path, error) from error
        tags = [f"{field}={info[field]}" for field in _STAMPS if info.get(field)]
        return f"{info.get('size')} {' '.join(tags)}" if tags else ""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else offset + length
        try:
            return bytes(self._fs.cat_file(self._path(name), start=offset, end=end))
        except Exception as error:  # drivers raise their own classes
            raise _unread(self._path(name), error) from error

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        data = self.read(name, offset, len(buffer))
        if len(data) < len(buffer):
            end = offset + len(data)
            raise Corrupted(f"{self._path(name)} ends at byte {end}, inside a needed range")
        buffer[:] = data

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        paths = [self._path(name) for name, _, _ in ranges]
        starts, ends = [start for _, start, _ in ranges], [end for _, _, end in ranges]
        answers = self._fs.cat_ranges(paths, starts, ends, on_error="return")
        return [
            _unread(path, answer) if isinstance(answer, BaseException) else bytes(answer)
            for path, answer in zip(paths, answers, strict=True)
        ]

    def read_checked(
        self, names: Sequence[str], segments: "NDArray[np.int64]", crcs: "NDArray[np.uint32]"
    ) -> None:
        for first, last in _batches(segments):
            rows = segments[first:last].tolist()
            ranges = [(names[file], offset, offset + size) for file, offset, size, _ in rows]
            answers = self.read_many(ranges)
            for index, (row, answer) in enumerate(zip(rows, answers, strict=True), first):
                try:
                    self._place(names[row[0]], row, int(crcs[index]), answer)
                except StorageError as error:
                    error.segment = index
                    raise

    def _place(self, name: str, row: list[int], crc: int, answer: bytes | StorageError) -> None:
        """Verifies the bytes of one row of `read_checked` and copies them to their address."""
        _, offset, size, address = row
        if isinstance(answer, StorageError):
            raise answer
        if len(answer) < size:
            end = offset + len(answer)
            raise Corrupted(f"{self._path(name)} ends at byte {end}, inside a needed range")
        if crc32(answer) != crc:
            where = f"bytes {offset} to {offset + size}"
            raise Corrupted(f"{self._path(name)}: the CRC32 of {where} does not match")
        ctypes.memmove(address, answer, size)

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        path, temporary = self._path(name), self._path(temporary_name(name))
        try:
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            with self._fs.open(temporary, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
            self._fs.mv(temporary, path)
        except FireflyerError:  # raised by `chunks`; some FireflyerErrors are OSErrors
            raise
        except OSError as error:
            raise failure_of("write", path, error) from error
        finally:
            self._discard(temporary)

    def create(self, name: str, data: bytes) -> bool:
        if self.exclusive_create:
            with _CREATING:
                return self._create(name, data)
        return self._create(name, data)

    def _create(self, name: str, data: bytes) -> bool:
        if self.size(name) is not None:
            return False
        self.write(name, [data])
        return True

    def list(self, name: str = "") -> list[str]:
        path = self._path(name)
        try:
            return sorted(
                entry.rstrip("/").rsplit("/", 1)[1] for entry in self._fs.ls(path, detail=False)
            )
        except FileNotFoundError as error:
            if (cause := _hidden(error)) is None:
                return []
            raise _unread(path, cause, "list") from error
        except Exception as error:  # drivers raise their own classes
            raise _unread(path, error, "list") from error

    def rename(self, old: str, new: str) -> None:
        source, target = self._path(old), self._path(new)
        try:
            self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            self._fs.mv(source, target)
        except OSError as error:
            raise failure_of("rename", source, error) from error

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            if self._fs.isdir(path) and self._fs.ls(path, detail=False):
                return
            self._discard(path)
        except OSError as error:
            raise failure_of("delete", path, error) from error

    def _discard(self, path: str) -> None:
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status in a driver's error; drivers keep it in different attributes."""
    answer = getattr(error, "response", None)
    metadata = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}
    for value in (
        *(getattr(error, "status", None), getattr(error, "status_code", None)),
        *(metadata.get("HTTPStatusCode"), getattr(error, "code", None)),
    ):
        if isinstance(value, int) and 400 <= value < 600:
            return value
    return None


def _unread(path: str, error: BaseException, action: str = "read") -> StorageError:
    """Converts a driver's error to a StorageError; unknown errors count as transient."""
    if not isinstance(error, Exception):
        raise error
    reason = str(error) or type(error).__name__
    status = _status(error)
    if status == _PAST_THE_END:
        kind: type[StorageError] = Corrupted
        reason = f"it ends before the needed range ({reason})"
    elif status is not None:
        kind = Unavailable if status >= 500 or status in _PASSING else StorageError
    else:
        kind = StorageError if isinstance(error, _PERMANENT) else Unavailable
    translated = kind(f"cannot {action} {path}: {reason}")
    translated.__cause__ = error
    return translated


def _hidden(missing: FileNotFoundError) -> Exception | None:
    """Returns the real cause of a driver's FileNotFoundError; None if the file is missing.

    The HTTP driver reports any failure as a missing file.
    """
    cause = missing.__cause__
    if not isinstance(cause, Exception):
        return None
    if (status := _status(cause)) is not None:
        return None if status in _GONE else cause
    absent = isinstance(cause, FileNotFoundError | NotADirectoryError)
    of_system = isinstance(cause, OSError) and not absent
    return cause if of_system or type(cause).__module__.partition(".")[0] == "aiohttp" else None


def _batches(segments: "NDArray[np.int64]") -> Iterator[tuple[int, int]]:
    """Yields ranges of rows with about `_BATCH_BYTES` in total."""
    first = filled = 0
    for index, size in enumerate(segments[:, 2].tolist()):
        if filled and filled + size > _BATCH_BYTES:
            yield first, index
            first, filled = index, 0
        filled += size
    if first < len(segments):
        yield first, len(segments)
