"""Catalog of datasets under one root: publishes, finds and removes versions.

A version exists from the `create` of its manifest, the last step of publishing, until the rename of
the manifest, the first step of removing. Each data directory belongs to one attempt to publish.
"""

import os
import pwd
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from fireflyer.datasets import manifest as mf
from fireflyer.datasets.dataset import Dataset, Paths, open_stored
from fireflyer.datasets.manifest import File, Manifest
from fireflyer.errors import (
    AccessDenied,
    ConfigError,
    Corrupted,
    NoSuchDataset,
    StorageError,
    VersionExists,
)
from fireflyer.ffrecord import ChunkCache, FileReader
from fireflyer.log import get_logger
from fireflyer.storage import DirectoryStorage, Storage, open_storage

_BLOCK = 4 << 20
_DEPTH = 4
_Numbers = list[int]
_Names = list[str]
_Datasets = list[Dataset]
_log = get_logger("datasets")


class Catalog:
    """Catalog of datasets under a root. Stateless: any number of processes may use one root.

    Args:
        root: a directory (created if missing), an fsspec URL, or a storage.
        user: name of the requesting user; default: the name of the process's effective user.
        cache: chunk cache for roots that are not local directories.

    Raises:
        ConfigError: an unknown URL scheme.
        StorageError: the directory cannot be created.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        user: str | None = None,
        cache: ChunkCache | None = None,
    ) -> None:
        self._storage: Storage = open_storage(root) if isinstance(root, str | os.PathLike) else root
        self.user = user if user is not None else _effective_user()
        self._cache = cache

    def publish(
        self,
        name: str,
        files: Paths,
        *,
        licence: str,
        description: str = "",
        version: int | None = None,
        schema: Any = None,
        owner: str | None = None,
        readers: Sequence[str] | None = None,
    ) -> Dataset:
        """Copies record files into the catalog as a version of `name`, which is complete on return.

        Every sample of the copies is verified. Samples that a writer appends to a source meanwhile
        are in the version completely or not at all.

        Args:
            files: local record files: one, a list in the order of the samples, or a directory.
            version: a number never used before; default: the next.
            schema: description of a sample as any JSON value.
            owner: user who owns the version; default: the catalog's user.
            readers: users besides the owner who may read; None: all users.

        Raises:
            ConfigError: an invalid name, version, schema or list of readers; no files; two files
                with the same name.
            VersionExists: the version exists, or existed.
            Corrupted: a copy does not match its checksums: its source is damaged, or was changed in
                place during the copy.
            StorageError, NoSpace: a source cannot be read, or a copy cannot be written.
        """
        mf.checked_name(name)
        if version is not None:
            self._refuse_used(name, mf.checked_version(version))
        if isinstance(readers, str | bytes):
            raise ConfigError(f"invalid readers {readers!r:.100}: expected a list of names")
        readers = None if readers is None else tuple(readers)
        paths = _sources(files)
        fields = {
            "format": mf.FORMAT,
            "name": name,
            "created": time.time(),
            "owner": owner if owner is not None else self.user,
            "readers": readers,
            "licence": licence,
            "description": description,
            "schema": schema,
        }
        while True:
            number = version if version is not None else self._next_version(name)
            data = mf.data_name(int(time.time()), secrets.token_bytes(8))
            place = mf.directory_of(name, number)
            try:
                self._check(fields, number, data, paths)
                self._set_mode(name, number, readers)
                copied = [self._copy(path, f"{place}/{data}/{path.name}") for path in paths]
                counts = self._verified([f"{place}/{data}/{path.name}" for path in paths], paths)
                whole = [
                    msgspec.structs.replace(file, samples=count)
                    for file, count in zip(copied, counts, strict=True)
                ]
                return self._commit(_manifest(fields, number, data, tuple(whole)))
            except VersionExists:
                self._delete_data(f"{place}/{data}")
                if version is not None:
                    raise
            except BaseException:
                self._delete_data(f"{place}/{data}")
                raise

    def get(self, name: str, version: int | None = None) -> Dataset:
        """Returns a version, by default the newest published version.

        Raises:
            NoSuchDataset: no such name or version exists.
            AccessDenied: the version is private and this user may not read it.
            Corrupted: its manifest is damaged.
        """
        mf.checked_name(name)
        if version is not None:
            return self._load(name, mf.checked_version(version))
        for number in reversed(self._numbers(name)):
            try:
                return self._load(name, number)
            except NoSuchDataset:
                continue
        raise NoSuchDataset(f"{self._storage} has no dataset {name!r}: `list()` shows what it has")

    def list(self, name: str | None = None) -> _Datasets:
        """Returns the newest version of each dataset that this user may read, in name order.

        With `name` it returns all versions of that dataset, ascending. Damaged manifests are
        skipped with a warning in the log.
        """
        names = list(self._names("", 0)) if name is None else [mf.checked_name(name)]
        found = []
        for one in names:
            for number in reversed(self._numbers(one)):
                try:
                    found.append(self._load(one, number))
                except (NoSuchDataset, AccessDenied):
                    continue
                except Corrupted as error:
                    _log.warning("omitted from the list: %s", error)
                    continue
                if name is None:
                    break
        return found if name is None else found[::-1]

    def remove(self, name: str, version: int) -> None:
        """Removes a version: first its manifest, atomically, then its data.

        The number of a removed version is never used again.

        Raises:
            NoSuchDataset: the version does not exist.
            AccessDenied: the user is not its owner.
        """
        dataset = self._load(mf.checked_name(name), mf.checked_version(version))
        manifest = dataset.manifest
        if manifest.owner != self.user:
            raise AccessDenied(
                f"{dataset.id} belongs to {manifest.owner}: {self.user} cannot remove it"
            )
        place = mf.directory_of(name, version)
        self._storage.rename(f"{place}/{mf.MANIFEST}", f"{place}/{mf.REMOVED}")
        self._delete_data(f"{place}/{manifest.data}")

    def sweep(self, older_than_s: float = 7 * 86400.0) -> _Names:
        """Deletes old data directories that belong to no published version; returns their names.

        Only directories that were begun more than `older_than_s` seconds ago are deleted. A
        publisher that takes longer than that would lose its data.
        """
        swept = []
        for name in self._names("", 0):
            for number in self._numbers(name):
                place = mf.directory_of(name, number)
                entries = self._entries(place)
                begun = {entry: mf.parse_data(entry) for entry in entries}
                try:
                    kept = self._data_of(name, number) if mf.MANIFEST in entries else None
                except Corrupted as error:
                    _log.warning("skipping the sweep next to a damaged manifest: %s", error)
                    continue
                for entry, seconds in begun.items():
                    if seconds is None or entry == kept or time.time() - seconds <= older_than_s:
                        continue
                    self._delete_data(f"{place}/{entry}")
                    swept.append(f"{place}/{entry}")
        return swept

    def _load(self, name: str, version: int) -> Dataset:
        where = f"{mf.directory_of(name, version)}/{mf.MANIFEST}"
        try:
            size = self._storage.size(where)
        except StorageError as error:
            if isinstance(error.__cause__, PermissionError):
                raise AccessDenied(f"{name} version {version} is private: {error}") from error
            raise
        if size is None:
            raise NoSuchDataset(f"{self._storage} has no version {version} of dataset {name!r}")
        if size > mf.MAX_BYTES:
            raise Corrupted(f"{self._storage}/{where} has {size} bytes: it is not a manifest")
        text = self._storage.read(where)
        manifest, digest = mf.decode(text, f"{self._storage}/{where}", name, version)
        if not manifest.readable_by(self.user):
            raise AccessDenied(
                f"{name} version {version} is private: ask {manifest.owner} to name {self.user} a reader"
            )
        return Dataset(self._storage, manifest, digest, self._cache)

    def _data_of(self, name: str, version: int) -> str:
        where = f"{mf.directory_of(name, version)}/{mf.MANIFEST}"
        text = self._storage.read(where)
        return mf.decode(text, f"{self._storage}/{where}", name, version)[0].data

    def _entries(self, place: str) -> _Names:
        """Returns the names in a directory; none if `place` is a file, or if this user has no
        access."""
        try:
            return self._storage.list(place)
        except StorageError as error:
            if isinstance(error.__cause__, PermissionError | NotADirectoryError):
                return []
            raise

    def _names(self, prefix: str, depth: int) -> Iterator[str]:
        """Yields the names of all datasets below `prefix`."""
        for entry in self._entries(prefix):
            name = f"{prefix}/{entry}" if prefix else entry
            try:
                mf.checked_name(name)
            except ConfigError:
                continue
            if self._numbers(name):
                yield name
            if depth + 1 < _DEPTH and not entry.endswith(".ffr"):
                yield from self._names(name, depth + 1)

    def _numbers(self, name: str) -> _Numbers:
        """Returns in ascending order the versions that have a directory, published or not."""
        found = (mf.parse_version(entry) for entry in self._entries(name))
        return sorted(number for number in found if number is not None)

    def _next_version(self, name: str) -> int:
        """Returns the number after the highest version that is or was published."""
        for number in reversed(self._numbers(name)):
            if self._used(name, number):
                return mf.checked_version(number + 1)
        return 1

    def _used(self, name: str, version: int) -> bool:
        place = mf.directory_of(name, version)
        try:
            entries = self._storage.list(place)
        except StorageError as error:
            if isinstance(error.__cause__, PermissionError):
                return True  # a private version of another user
            raise
        return mf.MANIFEST in entries or mf.REMOVED in entries

    def _refuse_used(self, name: str, version: int) -> None:
        if self._used(name, version):
            raise VersionExists(
                f"{name} version {version} is or was published and never changes: publish another version"
            )

    def _check(
        self, fields: dict[str, Any], version: int, data: str, paths: Iterable[Path]
    ) -> None:
        """Rejects fields that a manifest cannot hold, before any byte is copied."""
        files = tuple(File(name=p.name, samples=0, bytes=0, sha256="0" * 64) for p in paths)
        mf.encode(_manifest(fields, version, data, files))

    def _set_mode(self, name: str, version: int, readers: Sequence[str] | None) -> None:
        """Restricts a private version's directory by its mode, if the storage has modes."""
        if not isinstance(self._storage, DirectoryStorage):
            return
        place = self._storage.root / mf.directory_of(name, version)
        try:
            if readers is None:
                if place.exists():  # a publisher that died may have restricted access
                    place.chmod(0o755)
                return
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            place.chmod(0o750 if readers else 0o700)
            for directory in place.parents[: name.count("/") + 2]:
                _sync(directory)
        except PermissionError as error:
            raise VersionExists(f"another user has begun {name} version {version}") from error
        except OSError as error:
            raise StorageError(f"cannot make {place}: {error.strerror}") from error

    def _copy(self, source: Path, target: str) -> File:
        """Copies a source; the returned `samples` is still 0."""
        total, size = sha256(), 0

        def blocks() -> Iterator[bytes]:
            nonlocal size
            with source.open("rb", buffering=0) as file:
                while block := file.read(_BLOCK):
                    total.update(block)
                    size += len(block)
                    yield block

        self._storage.write(target, blocks())
        return File(name=source.name, samples=0, bytes=size, sha256=total.hexdigest())

    def _verified(self, copies: _Names, sources: Sequence[Path]) -> _Numbers:
        """Verifies all copies and returns the number of samples of each."""
        try:
            with open_stored(self._storage, copies, None) as reader:
                reader.validate()
                return [len(reader.get_checksums(number)) for number in range(len(copies))]
        except Corrupted as error:
            raise Corrupted(
                f"cannot publish {', '.join(map(str, sources)):.300}: damaged, or changed during the "
                f"copy: {error}"
            ) from error

    def _commit(self, manifest: Manifest) -> Dataset:
        name, version = manifest.name, manifest.version
        self._refuse_used(name, version)
        where = f"{mf.directory_of(name, version)}/{mf.MANIFEST}"
        text = mf.encode(manifest)
        _, digest = mf.decode(text, where, name, version)
        dataset = Dataset(self._storage, manifest, digest, self._cache)
        dataset.check_sizes()  # a sweep with too small an age may have deleted the data
        # Without an atomic create two publishers may both succeed: the stored content decides.
        if not self._storage.create(where, text) or self._storage.read(where) != text:
            raise VersionExists(
                f"another process published {name} version {version} at the same time"
            )
        return dataset

    def _delete_data(self, directory: str) -> None:
        try:
            for entry in self._storage.list(directory):
                self._storage.delete(f"{directory}/{entry}")
            self._storage.delete(directory)
        except StorageError as error:
            _log.warning("cannot delete data; `sweep` deletes it later: %s", error)


def _manifest(fields: dict[str, Any], version: int, data: str, files: tuple[File, ...]) -> Manifest:
    whole = {**fields, "version": version, "data": data, "files": files}
    try:
        return msgspec.convert(whole, Manifest)
    except ValueError as error:
        raise ConfigError(f"cannot publish {fields['name']}: {error}") from error


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sources(files: Paths) -> list[Path]:
    """Returns the files to publish, after checking that they can be opened together."""
    with FileReader(files) as reader:
        paths = [Path(path) for path in reader.fnames]
    names = [path.name for path in paths]
    if len(set(names)) != len(names):
        raise ConfigError(
            "two of the files have the same name: file names in a version must differ"
        )
    try:
        for name in names:
            File(name=name, samples=0, bytes=0, sha256="0" * 64)
    except ValueError as error:
        raise ConfigError(f"cannot publish: {error}; rename it") from error
    return paths


def _effective_user() -> str:
    user = os.geteuid()
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
