"""Blobs and manifests in the home. The manifest of a workspace is written last, so a workspace
exists once its manifest exists.

    workspaces/blobs/<sha256>                 bytes of a file, shared by all workspaces
    workspaces/manifests/u<user>/<id>.json    the workspaces of a user; mtime: last use
    workspaces/partial/                       files being written; emptied by each server that
        starts

A user can use a blob only after uploading it, or if one of the user's workspaces contains it.
Knowing the hash of another user's file does not give access to its bytes. Methods may be called
from several threads.
"""

import contextlib
import errno
import hashlib
import os
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

import msgspec

from fireflyer.errors import Corrupted, NoSpace, StorageError, WorkspaceError
from fireflyer.hai.workspaces.fsync import sync_all, sync_names
from fireflyer.hai.workspaces.manifest import MAX_BYTES, Manifest, decode, encode, identify
from fireflyer.hai.workspaces.stream import Begun, Ended, Splitter


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to an offered manifest."""

    id: str
    missing: tuple[str, ...]
    """Blobs to upload before the next offer; empty: the workspace exists."""


class WorkspaceView(msgspec.Struct, frozen=True, kw_only=True):
    """Current view of a workspace."""

    id: str
    user: str
    """Owner of the workspace."""
    files: int
    bytes: int
    used: float
    """Time at which the workspace was last shipped or submitted with a task, in seconds since
    1970."""


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of removed workspaces, blobs, bytes of blobs, and environments."""

    workspaces: int
    blobs: int
    bytes: int
    venvs: int = 0


class BlobStore:
    """All workspaces of a home."""

    def __init__(self, folder: Path) -> None:
        self._blobs = folder / "blobs"
        self._manifests = folder / "manifests"
        self._partial = folder / "partial"
        self._lock = threading.Lock()
        self._claims: dict[str, set[str]] = {}
        """Hashes of the blobs that a user may use, by user."""
        self._count = 0

    def open(self) -> None:
        """Creates the folders, and removes unfinished files of an earlier server.

        Raises:
            StorageError: the folder cannot be used.
        """
        with _translated(self._blobs.parent):
            for folder in (self._blobs.parent, self._blobs, self._manifests, self._partial):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file in self._partial.iterdir():
                file.unlink()

    # -- in ----------------------------------------------------------------------------------------

    def offer(self, manifest: Manifest, user: str) -> Offer:
        """Creates the workspace if the store has all its blobs; else returns the missing blobs.

        Args:
            manifest: manifest that `check` has accepted.
            user: owner of the workspace.
        """
        name = identify(manifest)
        with self._lock, _translated(self._blobs):
            claims = self._claimed(user)
            missing = [
                sha256
                for sha256, size in manifest.blobs().items()
                if sha256 not in claims or _size(self._blobs / sha256) != size
            ]
            if not missing:
                sync_names(self._blobs)
                folder = self._folder(user)
                if not folder.exists():
                    folder.mkdir(mode=0o700)
                    sync_names(self._manifests)
                self._write(folder / f"{name}.json", encode(manifest))
                sync_names(folder)
        return Offer(id=name, missing=tuple(missing))

    def receive(self, user: str) -> "Receiver":
        """Returns the receiver of one upload."""
        return Receiver(self, user)

    def _claimed(self, user: str) -> set[str]:
        if user not in self._claims:
            claims: set[str] = set()
            for name in self._names(user):
                claims.update(self._read(name, user).blobs())
            self._claims[user] = claims
        return self._claims[user]

    def _take(self, user: str, whole: list[tuple[str, Path]]) -> None:
        sync_all(self._partial)
        with self._lock:
            for sha256, partial in whole:
                os.replace(partial, self._blobs / sha256)
                self._claimed(user).add(sha256)

    def _new(self) -> Path:
        with self._lock:
            self._count += 1
            return self._partial / f"{os.getpid()}.{self._count}"

    def _write(self, path: Path, content: bytes) -> None:
        self._count += 1
        partial = self._partial / f"{os.getpid()}.{self._count}"
        with _create(partial) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    # -- out ---------------------------------------------------------------------------------------

    def manifest(self, name: str, user: str) -> Manifest:
        """Returns the manifest of a workspace.

        Raises:
            WorkspaceError: this user has no such workspace.
            Corrupted: its manifest is damaged.
        """
        with self._lock, _translated(self._manifests):
            return self._read(name, user)

    def use(self, name: str, user: str) -> Manifest:
        """Returns the manifest of a workspace, and marks the workspace as used now.

        Raises:
            WorkspaceError: this user has no such workspace.
            Corrupted: its manifest is damaged.
        """
        with self._lock, _translated(self._manifests):
            manifest = self._read(name, user)
            os.utime(self._path(name, user))
            return manifest

    def views(self, user: str | None = None) -> list[WorkspaceView]:
        """Returns the workspaces of a user, or of all users, the most recently used first."""
        with self._lock, _translated(self._manifests):
            users = self._users() if user is None else [user]
            found = [self._view(name, owner) for owner in users for name in self._names(owner)]
        return sorted(found, key=lambda view: (-view.used, view.id))

    def blob(self, sha256: str) -> Path:
        """Returns the path of a blob. REQUIRES: the hash is from a checked manifest."""
        return self._blobs / sha256

    def spoiled(self, sha256: str) -> None:
        """Removes a damaged blob, so that the next upload restores it."""
        with self._lock, _translated(self._blobs):
            (self._blobs / sha256).unlink(missing_ok=True)

    def prune(self, before: float, keep: Collection[str]) -> Pruned:
        """Removes workspaces last used before this moment, then blobs that no manifest names.

        Args:
            before: moment in seconds since 1970. Blobs that were uploaded later stay, too.
            keep: ids that stay in any case.
        """
        with self._lock, _translated(self._manifests):
            gone, named = 0, set[str]()
            for user in self._users():
                for name in self._names(user):
                    path = self._path(name, user)
                    if name not in keep and path.stat().st_mtime < before:
                        path.unlink()
                        gone += 1
                    else:
                        named.update(self._read(name, user).blobs())
            blobs, freed = 0, 0
            for blob in self._blobs.iterdir():
                facts = blob.stat()
                if blob.name not in named and facts.st_mtime < before:
                    blob.unlink()
                    blobs, freed = blobs + 1, freed + facts.st_size
            self._claims.clear()
        return Pruned(workspaces=gone, blobs=blobs, bytes=freed)

    def _folder(self, user: str) -> Path:
        return self._manifests / ("u" + quote(user, safe=""))

    def _path(self, name: str, user: str) -> Path:
        if len(name) != 64 or set(name) - set("0123456789abcdef"):
            raise WorkspaceError(
                f"unknown workspace {name!a}; `fireflyer workspace list` lists all of them"
            )
        return self._folder(user) / f"{name}.json"

    def _users(self) -> list[str]:
        return [unquote(folder.name[1:]) for folder in self._manifests.iterdir()]

    def _names(self, user: str) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError):
            yield from sorted(file.stem for file in self._folder(user).iterdir())

    def _read(self, name: str, user: str) -> Manifest:
        path = self._path(name, user)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise WorkspaceError(
                f"no workspace {name[:12]} here; ship the folder again with `fireflyer run --workspace`"
            ) from None
        if hashlib.sha256(data).hexdigest() != name:
            raise Corrupted(f"{path} is damaged; remove it and ship the folder again")
        return decode(data)

    def _view(self, name: str, user: str) -> WorkspaceView:
        manifest = self._read(name, user)
        return WorkspaceView(
            id=name,
            user=user,
            files=sum(1 for _ in manifest.files()),
            bytes=manifest.bytes(),
            used=self._path(name, user).stat().st_mtime,
        )


class Receiver:
    """Writes the blobs of one upload. They become visible after all blobs of the upload are on
    disk."""

    def __init__(self, store: BlobStore, user: str) -> None:
        self._store = store
        self._user = user
        self._splitter = Splitter(MAX_BYTES)
        self._file: BinaryIO | None = None
        self._path = Path()
        self._digest = hashlib.sha256()
        self._sha256 = ""
        self._whole: list[tuple[str, Path]] = []
        """Verified blobs and their partial files, which `finish` adds to the store."""

    def feed(self, data: bytes) -> None:
        """Receives the next bytes of the body.

        Raises:
            WorkspaceError: a blob does not match its hash, or is too long.
            NoSpace, StorageError: a blob cannot be written.
        """
        with _translated(self._path):
            for piece in self._splitter.feed(data):
                match piece:
                    case Begun():
                        self._path = self._store._new()
                        self._file = _create(self._path)
                        self._digest, self._sha256 = hashlib.sha256(), piece.sha256
                    case Ended():
                        self._settle()
                    case _:
                        assert self._file is not None
                        self._digest.update(piece)
                        self._file.write(piece)

    def _settle(self) -> None:
        assert self._file is not None
        if self._digest.hexdigest() != self._sha256:
            raise WorkspaceError(
                f"the blob {self._sha256[:12]} does not match its hash: its file changed while it was "
                "shipped; ship again"
            )
        self._file.close()
        self._file = None
        self._whole.append((self._sha256, self._path))

    def finish(self) -> None:
        """Ends the body and adds its blobs to the store.

        Raises:
            WorkspaceError: the body ends in the middle of a blob.
            NoSpace, StorageError: the blobs cannot be written.
        """
        self._splitter.finish()
        with _translated(self._path):
            self._store._take(self._user, self._whole)
        self._whole = []

    def close(self) -> None:
        """Removes partial files that were not added to the store."""
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)
        for _, path in self._whole:
            path.unlink(missing_ok=True)


def _create(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:  # NoSpace is also an OSError
        raise
    except OSError as error:
        kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
        raise kind(f"cannot use {error.filename or path}: {error.strerror}") from None


def hours_ago(hours: float) -> float:
    """Returns the moment `hours` before now, in seconds since 1970."""
    return time.time() - hours * 3600.0
