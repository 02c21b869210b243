"""Turns a manifest into a folder, completely or not at all: writes a partial folder, verifies,
syncs, and renames it."""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from fireflyer.errors import Corrupted, FireflyerError, NoSpace, StorageError, WorkspaceError
from fireflyer.hai.workspaces.blob_store import BlobStore
from fireflyer.hai.workspaces.fsync import sync_all, sync_names
from fireflyer.hai.workspaces.manifest import Entry, Manifest

_FICLONE = 0x40049409
_NO_CLONE = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM}


def place_task(store: BlobStore, name: str, user: str, folder: Path) -> None:
    """Creates a task's own copy of a workspace, unless the copy exists. Later attempts see the
    changes of earlier attempts.

    A change of a copy never changes the store. Files are copy-on-write clones if the file system
    supports them, else plain copies.

    Raises:
        WorkspaceError: the workspace no longer exists.
        Corrupted: a blob no longer matches its hash. The blob is removed, so shipping again
            restores it.
        NoSpace, StorageError: the folder cannot be written.
    """
    if folder.is_dir():
        return

    def fetch(entry: Entry, descriptor: int) -> None:
        try:
            source = os.open(store.blob(entry.sha256), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Corrupted(_lost(entry)) from None
        try:
            _copy(source, descriptor)
        finally:
            os.close(source)

    try:
        place(store.manifest(name, user), folder, fetch)
    except _Differs as error:
        store.spoiled(error.entry.sha256)
        raise Corrupted(_lost(error.entry)) from None


def place(manifest: Manifest, folder: Path, fetch: Callable[[Entry, int], None]) -> None:
    """Writes a checked manifest as a folder that does not exist or is empty.

    Args:
        manifest: manifest that `check` has accepted.
        folder: target folder; afterwards it exists completely or not at all.
        fetch: writes an entry's bytes to a descriptor; the bytes are read back and verified.

    Raises:
        WorkspaceError: the folder exists and is not empty.
        Corrupted: bytes do not match their hash.
        NoSpace, StorageError: the folder cannot be written.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        if os.path.lexists(partial):
            _remove(partial)
        partial.mkdir(mode=0o700)
        _fill(manifest, partial, fetch)
        sync_all(partial)
        try:
            os.rename(partial, folder)  # replaces at most an empty directory
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise WorkspaceError(f"{folder} exists and is not an empty folder") from None
            raise
        sync_names(folder.parent)
    except FireflyerError:
        with contextlib.suppress(OSError):
            _remove(partial)
        raise
    except OSError as error:
        with contextlib.suppress(OSError):
            _remove(partial)
        kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
        raise kind(f"cannot write {error.filename or partial}: {error.strerror}") from None


def _fill(manifest: Manifest, folder: Path, fetch: Callable[[Entry, int], None]) -> None:
    """Writes the entries. Links come after files, so that no file is written through a link. Modes
    of directories come last, deepest first."""
    kinds = {kind: [e for e in manifest.entries if e.kind == kind] for kind in _KINDS}
    for entry in kinds["directory"]:
        (folder / entry.path).mkdir(mode=0o700)
    for entry in kinds["file"]:
        _file(folder / entry.path, entry, fetch)
    for entry in kinds["link"]:
        (folder / entry.path).symlink_to(entry.target)
    for entry in reversed(kinds["directory"]):
        (folder / entry.path).chmod(entry.mode)


_KINDS = ("directory", "file", "link")


def _file(path: Path, entry: Entry, fetch: Callable[[Entry, int], None]) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "rb", buffering=0) as file:
        fetch(entry, file.fileno())
        file.seek(0)
        if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
            raise _Differs(entry)
        os.fchmod(file.fileno(), entry.mode)


class _Differs(Corrupted):
    def __init__(self, entry: Entry) -> None:
        super().__init__(f"the bytes of {entry.path} differ from the shipped ones; pull again")
        self.entry = entry


def _lost(entry: Entry) -> str:
    return f"the home no longer has the bytes of {entry.path}; ship the folder again"


def _copy(source: int, target: int) -> None:
    try:
        fcntl.ioctl(target, _FICLONE, source)
        return
    except OSError as error:
        if error.errno not in _NO_CLONE:
            raise
    while piece := os.read(source, 1 << 20):
        write_all(target, piece)


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all bytes.

    Raises:
        OSError: the bytes cannot be written.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)
