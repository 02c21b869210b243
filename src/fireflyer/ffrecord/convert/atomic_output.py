"""Atomic placement of results: complete or absent; only `force` replaces existing data."""

import ctypes
import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from fireflyer.errors import ConfigError, FireflyerError, NoSpace, StorageError
from fireflyer.ffrecord.output import new_file, reserve, sweep, sync_directory
from fireflyer.storage import targets

_URL = re.compile("[a-z][a-z0-9+.-]+:/")
"""Start of a URL after `Path` has reduced its two slashes to one."""
PART = re.compile(r"PART_\d{5,}\.ffr")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def is_part(name: str) -> bool:
    return PART.fullmatch(name) is not None


def refuse_existing(out: Path, *, force: bool) -> None:
    """Checks that a file may be written at `out`. A pipe or a device passes.

    Raises:
        ConfigError: a folder exists there, a file exists and `force` is not set, or the parent is
            missing.
    """
    if targets.is_stream(out):
        return
    _refuse_without_parent(out, Path(targets.final_path(out)).parent)
    if out.is_dir():
        raise ConfigError(f"{out} exists and is not a file: use another name")
    if out.exists() and not force:
        raise ConfigError(f"{out} already exists: use another name, or replace it with --force")


class NewFolder:
    """Folder that is filled at the temporary `path`, and finally renamed to its name or deleted.

    It replaces only an empty folder, or with `force` a folder that has only files, all of which
    `own` accepts. The replacement is atomic if the file system supports RENAME_EXCHANGE. Otherwise
    it takes two renames. If the process is killed between them, no folder has the name, and the
    next NewFolder of that name restores the old folder.

    Args:
        out: name of the folder.
        force: True to replace a folder with files.
        own: returns True for the name of a file that this command may have written.
        sources: paths that the rows are read from. A folder that contains such a path, or is inside
            such a path, is not replaced.

    Raises:
        ConfigError: the target has other data. This is checked on entry, and again at the end.
        NoSpace, StorageError: the folder cannot be written.
    """

    def __init__(
        self,
        out: Path,
        *,
        force: bool = False,
        own: Callable[[str], bool] = is_part,
        sources: Sequence[str] = (),
    ) -> None:
        self._out, self._force, self._own, self._sources = out, force, own, sources
        self._place = Path(targets.final_path(out))

    def __enter__(self) -> Self:
        _refuse_without_parent(self._out, self._place.parent)
        try:
            self._recover()
            self._guard()
            path, self._lock = reserve(str(self._place), _new_folder)
        except OSError as error:
            raise _cannot_write(self._out, error) from error
        self.path = Path(path)
        self._placed = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._guard()
                self._take_place()
            elif isinstance(error, FireflyerError):
                if str(self.path) in str(error):
                    message = str(error).replace(str(self.path), str(self._out))
                    raise type(error)(message) from error
            elif isinstance(error, OSError):
                raise error
        except FireflyerError:  # some FireflyerErrors are also OSErrors
            raise
        except OSError as failed:
            raise _cannot_write(self._out, failed) from failed
        finally:
            if not self._placed:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)

    def _guard(self) -> None:
        out, place = self._out, self._place
        if not os.path.lexists(place):
            return
        if not place.is_dir():
            raise ConfigError(f"{out} exists and is not a folder: use another name")
        here = Path.cwd()
        if place in (here, *here.parents):
            raise ConfigError(
                f"cannot replace {out}: it is the current folder or encloses it; use a folder inside it"
            )
        with os.scandir(place) as found:
            foreign = {e.name: not e.is_file(follow_symlinks=False) for e in found}
        if not foreign:
            return
        if not self._force:
            raise ConfigError(f"{out} already exists: use another name, or replace it with --force")
        for source in self._sources:
            real = Path(os.path.realpath(source))
            if real == place or real in place.parents or place in real.parents:
                raise ConfigError(
                    f"{out} contains the source {source} or is inside it: use another name"
                )
        for name in sorted(foreign):
            if foreign[name] or not self._own(name):
                raise ConfigError(
                    f"{out} contains {name!r}, which this command does not write; --force replaces "
                    "only folders of such files: delete that entry, or use another name"
                )

    def _take_place(self) -> None:
        place = self._place
        if not place.exists() or not any(place.iterdir()):
            self.path.rename(place)
            self._placed = True
        elif exchange(self.path, place):
            self._placed = True
            sync_directory(place.parent)
            sweep(str(self.path))
            return
        else:
            aside = self._aside()
            place.rename(aside)
            self.path.rename(place)
            self._placed = True
            sync_directory(place.parent)
            shutil.rmtree(aside, ignore_errors=True)
            return
        sync_directory(place.parent)

    def _aside(self) -> Path:
        """Returns the temporary name of a folder that is replaced in two steps."""
        tag = hashlib.sha256(os.fsencode(self._place.name)).hexdigest()[:16]
        return self._place.parent / f".ffrecord-{tag}.old"

    def _recover(self) -> None:
        """Cleans up after a replacement by two renames whose process was killed.

        If the new folder is in place, deletes the old folder; otherwise restores it.
        """
        aside = self._aside()
        if not aside.is_dir():
            return
        if os.path.lexists(self._place):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(self._place)


def exchange(one: Path, other: Path) -> bool:
    """Swaps two names atomically; False if the system or the file system does not support that."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    call.argtypes = (
        *(ctypes.c_int, ctypes.c_char_p),
        *(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint),
    )
    names = os.fsencode(one), os.fsencode(other)
    if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def write_atomically(out: Path, fill: Callable[[Path], None]) -> int:
    """Writes a file atomically: `fill` writes a file beside `out`, which is renamed to `out`.

    The file is synced before the rename, and deleted after an error. If `out` is a symlink, the
    file behind it is replaced. If `out` is a pipe or a device, `fill` writes a temporary file,
    whose bytes are then copied.

    Returns:
        The number of bytes.

    Raises:
        NoSpace, StorageError: the file cannot be written.
    """
    try:
        if targets.is_stream(out):
            return _write_stream(out, fill)
        place = targets.behind_links(out)
        path, lock = reserve(place, new_file)
        placed = False
        try:
            fill(Path(path))
            os.fsync(lock)
            size = os.fstat(lock).st_size
            os.replace(path, place)
            placed = True
            sync_directory(os.path.dirname(place))
            return size
        finally:
            if not placed:
                Path(path).unlink(missing_ok=True)
            os.close(lock)
    except FireflyerError:  # some FireflyerErrors are also OSErrors
        raise
    except BrokenPipeError:  # the reader closed the pipe
        raise
    except OSError as error:
        raise _cannot_write(out, error) from error


def _write_stream(out: Path, fill: Callable[[Path], None]) -> int:
    with tempfile.TemporaryDirectory(prefix="fireflyer-") as folder:
        path = Path(folder, "whole")
        fill(path)
        with open(path, "rb") as whole, open(targets.open_stream(out), "wb") as stream:
            shutil.copyfileobj(whole, stream)
            return whole.tell()


def _refuse_without_parent(out: Path, parent: Path) -> None:
    if _URL.match(str(out)):
        raise ConfigError(
            f"{out} is a URL, and results are files of this machine: write a local file, then copy "
            "it, e.g. with `fireflyer fs put`"
        )
    if not parent.is_dir():
        raise ConfigError(f"{out}: its folder does not exist; create it or use another name")


def _new_folder(path: str) -> int:
    os.mkdir(path)
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:  # another process's `sweep` removed the folder
        raise FileExistsError(path) from error


def _cannot_write(out: Path, error: OSError) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (NoSpace if full else StorageError)(f"cannot write {out}: {error.strerror or error}")
