"""Storage in a local or mounted directory."""

import contextlib
import errno
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fireflyer._native.storage import Writer, read_checked, read_summed
from fireflyer.errors import Corrupted, FireflyerError, StorageError
from fireflyer.storage.protocol import (
    Chunk,
    Range,
    checked_name,
    failure_of,
    read_each,
    temporary_name,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LARGE_CHUNK = 1 << 20
"""Minimum size of a file's first chunk for writes that bypass the page cache."""


class DirectoryStorage:
    """Local (or mounted) directory.

    `write` uses a temporary file, fsync, rename, and fsync of the directory. `create` needs hard
    links.
    """

    exclusive_create = True

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        try:
            self._make_directory(self.root)
        except FileExistsError as error:
            place = Path(error.filename)
            what = "a link to nothing" if place.is_symlink() else "not a directory"
            raise StorageError(f"cannot make directory {self.root}: {place} is {what}") from error
        except OSError as error:
            raise failure_of("make directory", self.root, error) from error

    def __str__(self) -> str:
        return str(self.root)

    def size(self, name: str) -> int | None:
        path = self.root / checked_name(name)
        try:
            return path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise failure_of("look at", path, error) from error

    def stamp(self, name: str) -> str:
        path = self.root / checked_name(name)
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            raise failure_of("look at", path, error) from error
        return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        path = self.root / checked_name(name)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(-1 if length is None else length)
        except OSError as error:
            raise failure_of("read", path, error) from error

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        path = self.root / checked_name(name)
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
            raise failure_of("read", path, error) from error

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        return read_each(self, ranges)

    def read_checked(
        self, names: Sequence[str], segments: "NDArray[np.int64]", crcs: "NDArray[np.uint32]"
    ) -> None:
        read_checked([str(self.root / checked_name(name)) for name in names], segments, crcs)

    def read_shared(
        self, names: Sequence[str], segments: "NDArray[np.int64]", crcs: "NDArray[np.uint32]"
    ) -> None:
        """Implements `fireflyer.storage.read_shared`: reads whole pages without a copy."""
        paths = [str(self.root / checked_name(name)) for name in names]
        read_checked(paths, segments, crcs, in_place=True)

    def read_summed(
        self, names: Sequence[str], rows: "NDArray[np.int64]", starts: Sequence[int]
    ) -> "list[int]":
        """Implements `fireflyer.storage.read_summed`."""
        return read_summed([str(self.root / checked_name(name)) for name in names], rows, starts)

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        path = self.root / checked_name(name)
        temporary = self.root / temporary_name(name)
        try:
            self._write_new(temporary, chunks)
            os.replace(temporary, path)
            self._sync_directory(path.parent)
        except FireflyerError:  # raised by `chunks`; some FireflyerErrors are OSErrors
            raise
        except OSError as error:
            raise failure_of("write", path, error) from error
        finally:
            _discard(temporary)

    def create(self, name: str, data: bytes) -> bool:
        path = self.root / checked_name(name)
        temporary = self.root / temporary_name(name)
        try:
            self._write_new(temporary, [data])
            os.link(temporary, path)
            self._sync_directory(path.parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise failure_of("create", path, error) from error
        finally:
            _discard(temporary)
        return True

    def list(self, name: str = "") -> list[str]:
        path = self.root / checked_name(name)
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise failure_of("list", path, error) from error

    def rename(self, old: str, new: str) -> None:
        source, target = self.root / checked_name(old), self.root / checked_name(new)
        try:
            self._make_directory(target.parent)
            os.replace(source, target)
            self._sync_directory(target.parent)
            self._sync_directory(source.parent)
        except OSError as error:
            raise failure_of("rename", source, error) from error

    def delete(self, name: str) -> None:
        path = self.root / checked_name(name)
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
            raise failure_of("delete", path, error) from error

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
                continue  # another process removed the empty directory meanwhile

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


def _discard(temporary: Path) -> None:
    # The original error matters more than a cleanup error.
    with contextlib.suppress(OSError):
        temporary.unlink()
