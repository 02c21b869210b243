"""The storage protocol: named byte files under one root, reached through a local directory or any fsspec URL.

A name is relative and "/"-separated, e.g. "step-000000000100/data.bin". What a writing call has
returned from survives a crash; what it has not returned from is invisible under its final name.
Several threads and processes may use one root; two writers of one name must not run at once
except through `create`.
"""

import contextlib
import ctypes
import errno
import importlib.metadata
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fireflyer._native import crc32
from fireflyer._native.storage import Writer, read_checked
from fireflyer.errors import ConfigError, Corrupted, NoSpace, StorageError, Unavailable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ENTRY_POINTS = "fireflyer.storage"
"""Group of entry points: the scheme of a URL -> what makes a Storage of such a URL."""

TEMPORARY_SUFFIX = ".tmp"
"""Ends the names of files that are being written; a killed writer leaves them behind."""

Chunk = bytes | bytearray | memoryview
"""Contiguous bytes to write."""

Range = tuple[str, int, int]
"""Name, first byte, byte behind the last."""

_PERMANENT = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(NotImplementedError, ValueError, TypeError),
)

_PASSING = (408, 425, 429)
"""HTTP statuses below 500 after which the same request may succeed."""
_GONE = (404, 410)
_PAST_THE_END = 416

_STAMPS = (
    *("ETag", "etag", "Content-MD5", "Digest", "md5Hash", "generation", "VersionId", "version_id"),
    *("mtime", "Last-Modified", "LastModified", "last_modified", "modificationTime", "modified"),
    *("updated", "created", "ino"),
)
"""What drivers of fsspec call the version of a file, or the time of its last change."""

_LARGE_CHUNK = 1 << 20
"""A file whose first chunk is as large as this is written past the page cache."""

_BATCH_BYTES = 32 << 20
"""What a checked read by fsspec asks for at a time."""

_counter = itertools.count()


class Storage(Protocol):
    """What checkpoints and datasets need of a place that holds bytes.

    Every call raises StorageError (NoSpace when the place is full), naming the file.
    """

    def size(self, name: str) -> int | None:
        """Bytes in the file; None when there is no such file."""
        ...

    def stamp(self, name: str) -> str:
        """Changes whenever the contents of the file do (an ETag, the time of the last change); "" if the
        place tells nothing of the kind, or there is no such file."""
        ...

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes [offset, offset + length) of a file; fewer at its end, all when `length` is None."""
        ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (writable, contiguous bytes) from `offset`.

        Raises:
            Corrupted: if the file ends before the buffer is full.
        """
        ...

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        """What `read` gives for each range, all in one request where the place can; a range that could
        not be read has its error in its place, an `Unavailable` if it is worth repeating."""
        ...

    def read_checked(
        self, names: Sequence[str], segments: "NDArray[np.int64]", crcs: "NDArray[np.uint32]"
    ) -> None:
        """Reads many segments to their places in memory and compares their CRC32.

        Args:
            names: files.
            segments: int64[n, 4], C order: index of the name, offset, bytes (at most 4 MiB), address of
                writable memory that stays valid during the call.
            crcs: uint32[n].

        Raises:
            Corrupted: a CRC does not hold or a file ends too early. `segment` is the index of the first one
                found; any memory may have been written to.
            StorageError: likewise, of a file that cannot be read.
        """
        ...

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Makes a file of these chunks, replacing an older one: afterwards it is whole and durable; after a
        failure the older one is unchanged and nothing else is left. Chunks must not change before it returns:
        writing goes on while the next one is being waited for."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Like `write`, but returns False, changing nothing, if the name exists already."""
        ...

    def list(self, name: str = "") -> list[str]:
        """Sorted names of the files and directories directly in a directory; [] if it does not exist."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Gives a file another name, replacing what is there."""
        ...

    def delete(self, name: str) -> None:
        """Removes a file or an empty directory; leaves a directory that is not empty. No error if absent."""
        ...


def open_storage(place: str | os.PathLike[str]) -> Storage:
    """The storage of a path or URL.

    A directory, made if missing, for a path or file:// URL; what an installed package offers for the URL's
    scheme as an entry point of the group `fireflyer.storage` (a function of the URL: fs3://); else fsspec's.
    """
    text = os.fspath(place)
    scheme, is_url, rest = text.partition("://")
    if not is_url or scheme == "file":
        return DirectoryStorage(Path(rest if is_url else text))
    for offered in importlib.metadata.entry_points(group=ENTRY_POINTS, name=scheme):
        storage: Storage = offered.load()(text)
        return storage
    return FsspecStorage(text)


def read_each(storage: Storage, ranges: Sequence[Range]) -> list[bytes | StorageError]:
    """`read_many` for a place that knows no request for several ranges."""
    answers: list[bytes | StorageError] = []
    for name, start, end in ranges:
        try:
            answers.append(storage.read(name, start, end - start))
        except StorageError as error:
            answers.append(error)
    return answers


def _checked(name: str) -> str:
    parts = name.split("/")
    if name and (name.startswith("/") or any(part in ("", ".", "..") for part in parts)):
        raise ValueError(
            f"storage name {name!r} must be relative, without empty, '.' or '..' parts"
        )
    return name


def _temporary(name: str) -> str:
    return f"{name}.{os.getpid()}-{next(_counter)}{TEMPORARY_SUFFIX}"


def _error(action: str, path: object, error: OSError) -> StorageError:
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"cannot {action} {path}: {reason}; free some space and try again")
    return StorageError(f"cannot {action} {path}: {reason}")


def _status(error: BaseException) -> int | None:
    """The HTTP status that a driver's error carries, each in its way."""
    answer = getattr(error, "response", None)
    told = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}
    for value in (
        *(getattr(error, "status", None), getattr(error, "status_code", None)),
        *(told.get("HTTPStatusCode"), getattr(error, "code", None)),
    ):
        if isinstance(value, int) and 400 <= value < 600:
            return value
    return None


def _unread(path: str, error: BaseException, action: str = "read") -> StorageError:
    """A driver's error as one of ours. What says nothing of a missing file or right may pass."""
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


def _batches(segments: "NDArray[np.int64]") -> Iterator[tuple[int, int]]:
    """Ranges of rows of about `_BATCH_BYTES` in all."""
    first = filled = 0
    for index, size in enumerate(segments[:, 2].tolist()):
        if filled and filled + size > _BATCH_BYTES:
            yield first, index
            first, filled = index, 0
        filled += size
    if first < len(segments):
        yield first, len(segments)


def _write_small(fd: int, chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest:
            rest = rest[os.write(fd, rest) :]


def _write_large(fd: int, chunks: Iterable[Chunk]) -> None:
    writer = Writer(fd)
    try:
        for chunk in chunks:
            writer.append(chunk)
        writer.finish()
    finally:
        writer.close()


def _hidden(missing: FileNotFoundError) -> Exception | None:
    """What a driver (that of HTTP: any failure) reports as a missing file; None if it is missing."""
    cause = missing.__cause__
    if not isinstance(cause, Exception):
        return None
    if (status := _status(cause)) is not None:
        return None if status in _GONE else cause
    absent = isinstance(cause, FileNotFoundError | NotADirectoryError)
    of_system = isinstance(cause, OSError) and not absent
    return cause if of_system or type(cause).__module__.partition(".")[0] == "aiohttp" else None


def _discard(temporary: Path) -> None:
    # The error that led here matters more than one of tidying up.
    with contextlib.suppress(OSError):
        temporary.unlink()


class DirectoryStorage:
    """A local (or mounted) directory.

    `write` = temporary name, fsync, rename, fsync of the directory. `create` needs hard links.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        try:
            self._make_directory(self.root)
        except OSError as error:
            raise _error("make directory", self.root, error) from error

    def __str__(self) -> str:
        return str(self.root)

    def size(self, name: str) -> int | None:
        path = self.root / _checked(name)
        try:
            return path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _error("look at", path, error) from error

    def stamp(self, name: str) -> str:
        path = self.root / _checked(name)
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            raise _error("look at", path, error) from error
        return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        path = self.root / _checked(name)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(-1 if length is None else length)
        except OSError as error:
            raise _error("read", path, error) from error

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        path = self.root / _checked(name)
        try:
            with path.open("rb", buffering=0) as file:
                filled = 0
                while filled < len(buffer):
                    count = os.preadv(file.fileno(), [buffer[filled:]], offset + filled)
                    if count == 0:
                        raise Corrupted(
                            f"{path} ends at byte {offset + filled}, inside a needed range"
                        )
                    filled += count
        except OSError as error:
            raise _error("read", path, error) from error

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        return read_each(self, ranges)

    def read_checked(
        self, names: Sequence[str], segments: "NDArray[np.int64]", crcs: "NDArray[np.uint32]"
    ) -> None:
        read_checked([str(self.root / _checked(name)) for name in names], segments, crcs)

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        path = self.root / _checked(name)
        temporary = self.root / _temporary(name)
        try:
            self._write_new(temporary, chunks)
            os.replace(temporary, path)
            self._sync_directory(path.parent)
        except OSError as error:
            raise _error("write", path, error) from error
        finally:
            _discard(temporary)

    def create(self, name: str, data: bytes) -> bool:
        path = self.root / _checked(name)
        temporary = self.root / _temporary(name)
        try:
            self._write_new(temporary, [data])
            os.link(temporary, path)
            self._sync_directory(path.parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise _error("create", path, error) from error
        finally:
            _discard(temporary)
        return True

    def list(self, name: str = "") -> list[str]:
        path = self.root / _checked(name)
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _error("list", path, error) from error

    def rename(self, old: str, new: str) -> None:
        source, target = self.root / _checked(old), self.root / _checked(new)
        try:
            self._make_directory(target.parent)
            os.replace(source, target)
            self._sync_directory(target.parent)
            self._sync_directory(source.parent)
        except OSError as error:
            raise _error("rename", source, error) from error

    def delete(self, name: str) -> None:
        path = self.root / _checked(name)
        try:
            try:
                path.unlink()
            except IsADirectoryError:
                path.rmdir()
            self._sync_directory(path.parent)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                return
            raise _error("delete", path, error) from error

    def _write_new(self, path: Path, chunks: Iterable[Chunk]) -> None:
        parts = iter(chunks)
        first = next(parts, b"")
        fd = self._open_new(path)
        try:
            if memoryview(first).nbytes >= _LARGE_CHUNK:
                _write_large(fd, itertools.chain([first], parts))
            else:
                _write_small(fd, itertools.chain([first], parts))
            os.fsync(fd)
        finally:
            os.close(fd)

    def _open_new(self, path: Path) -> int:
        while True:
            self._make_directory(path.parent)
            try:
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # another process removed the directory, empty, since it was made or seen

    @staticmethod
    def _sync_directory(path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _make_directory(self, path: Path) -> None:
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            self._sync_directory(directory.parent)


class FsspecStorage:
    """Any file system that fsspec knows, by URL.

    A whole file appears at once where the file system's own move or put does so (object stores,
    memory); `create` checks and then writes, so it cannot arbitrate between racing writers.
    Pickles by its URL; a forked child connects anew.
    """

    def __init__(self, url: str) -> None:
        """
        Raises:
            ConfigError: if fsspec does not know the URL's scheme, or lacks the package for it.
        """
        self._url = url
        self._connect()

    def _connect(self) -> None:
        import fsspec.core  # only here: most programs never need it

        try:
            self._system, root = fsspec.core.url_to_fs(self._url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"cannot use {self._url}: {error}") from error
        self._root = str(root).rstrip("/")
        self._process = os.getpid()

    @property
    def _fs(self) -> Any:
        if self._process != os.getpid():
            self._connect()  # connections and the event loop stay with the parent
        return self._system

    def __reduce__(self) -> tuple[type["FsspecStorage"], tuple[str]]:
        return type(self), (self._url,)

    def __str__(self) -> str:
        return self._url

    def _path(self, name: str) -> str:
        return f"{self._root}/{_checked(name)}" if name else self._root

    def size(self, name: str) -> int | None:
        path = self._path(name)
        try:
            size = self._fs.size(path)
        except FileNotFoundError as error:
            if (cause := _hidden(error)) is None:
                return None
            raise _unread(path, cause, "open") from error
        except Exception as error:  # drivers raise their own
            raise _unread(path, error) from error
        if size is None:
            raise StorageError(f"cannot read {path}: its server does not tell its size")
        return int(size)

    def stamp(self, name: str) -> str:
        path = self._path(name)
        try:
            self._fs.invalidate_cache(path)  # what an earlier listing said
            info = self._fs.info(path)
        except FileNotFoundError as error:
            if (cause := _hidden(error)) is None:
                return ""
            raise _unread(path, cause, "open") from error
        except Exception as error:  # drivers raise their own
            raise _unread(path, error) from error
        told = [f"{field}={info[field]}" for field in _STAMPS if info.get(field)]
        return f"{info.get('size')} {' '.join(told)}" if told else ""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else offset + length
        try:
            return bytes(self._fs.cat_file(self._path(name), start=offset, end=end))
        except Exception as error:  # drivers raise their own
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
        """Puts the bytes of one row of `read_checked` to their place."""
        _, offset, size, address = row
        if isinstance(answer, StorageError):
            raise answer
        if len(answer) < size:
            end = offset + len(answer)
            raise Corrupted(f"{self._path(name)} ends at byte {end}, inside a needed range")
        if crc32(answer) != crc:
            where = f"bytes {offset} to {offset + size}"
            raise Corrupted(f"{self._path(name)}: the CRC32 of {where} does not hold")
        ctypes.memmove(address, answer, size)

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        path, temporary = self._path(name), self._path(_temporary(name))
        try:
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            with self._fs.open(temporary, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
            self._fs.mv(temporary, path)
        except OSError as error:
            raise _error("write", path, error) from error
        finally:
            self._discard(temporary)

    def create(self, name: str, data: bytes) -> bool:
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
        except Exception as error:  # drivers raise their own
            raise _unread(path, error, "list") from error

    def rename(self, old: str, new: str) -> None:
        source, target = self._path(old), self._path(new)
        try:
            self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            self._fs.mv(source, target)
        except OSError as error:
            raise _error("rename", source, error) from error

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            if self._fs.isdir(path) and self._fs.ls(path, detail=False):
                return
            self._discard(path)
        except OSError as error:
            raise _error("delete", path, error) from error

    def _discard(self, path: str) -> None:
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)
