"""One published version of a dataset, and functions that open record files in any storage."""

import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, Protocol

from fireflyer.datasets.manifest import Manifest, directory_of
from fireflyer.errors import Corrupted, StorageError
from fireflyer.ffrecord import ChunkCache, FileReader, RemoteFiles
from fireflyer.ffrecord.reader import Indices
from fireflyer.ffrecord.spans import map_in_threads
from fireflyer.storage import DirectoryStorage, Storage

_BLOCK = 4 << 20

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class Reader(Protocol):
    """Data interface of a loader: `FileReader`, `RemoteFiles` or a custom reader."""

    @property
    def n(self) -> int:
        """Number of samples."""
        ...

    def read(self, indices: Indices, /) -> Any:
        """Returns the samples at `indices`, in that order; several threads may call it concurrently."""
        ...


class Dataset:
    """Version of a dataset in a catalog, as `Catalog.get` returns it. The object can be pickled.

    Attributes:
        manifest: the published manifest.
        id: name, version and the head of the manifest's SHA-256; equal ids mean equal bytes.
        n: number of samples.
    """

    def __init__(
        self, storage: Storage, manifest: Manifest, digest: str, cache: ChunkCache | None
    ) -> None:
        self._storage, self._digest, self._cache = storage, digest, cache
        self.manifest = manifest
        self.id = f"{manifest.name}@{manifest.version}:{digest[:16]}"
        self.n = manifest.samples

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Dataset({self.id}, {self.n} samples in {len(self.manifest.files)} files)"

    def __reduce__(self) -> tuple[type["Dataset"], tuple[Any, ...]]:
        return type(self), (self._storage, self.manifest, self._digest, self._cache)

    def open(self, cache: ChunkCache | None = None) -> FileReader | RemoteFiles:
        """Returns a reader of all samples; `cache` (default: the catalog's) is for remote roots.

        Raises:
            Corrupted: the number or the sizes of samples or files differ from the manifest.
            StorageError: a file is missing or cannot be read.
        """
        self.check_sizes()
        paths = [self._path(file.name) for file in self.manifest.files]
        reader = open_stored(self._storage, paths, cache or self._cache)
        if reader.n != self.n:
            raise Corrupted(f"{self.id}: its files hold {reader.n} samples, not {self.n}")
        return reader

    def check_sizes(self) -> None:
        """Compares the size of every file with the manifest; raises the same errors as `open`."""
        paths = [self._path(file.name) for file in self.manifest.files]
        sizes = map_in_threads(self._storage.size, paths)
        for file, size in zip(self.manifest.files, sizes, strict=True):
            if size is None:
                raise StorageError(f"{self.id}: file {file.name} is missing from its data")
            if size != file.bytes:
                raise Corrupted(f"{self.id}: {file.name} has {size} bytes, not {file.bytes}")

    def verify(self) -> None:
        """Reads all files and compares them with the SHA-256s of the manifest.

        Raises:
            Corrupted: a file differs.
            StorageError: a file is missing or cannot be read.
        """
        for file in self.manifest.files:
            path, total, at = self._path(file.name), sha256(), 0
            while block := self._storage.read(path, at, _BLOCK):
                total.update(block)
                at += len(block)
            if at != file.bytes or total.hexdigest() != file.sha256:
                raise Corrupted(
                    f"{self.id}: {file.name} does not match its SHA-256; publish the data again"
                )

    def _path(self, file: str) -> str:
        manifest = self.manifest
        return f"{directory_of(manifest.name, manifest.version)}/{manifest.data}/{file}"


def open_stored(
    storage: Storage, names: Sequence[str], cache: ChunkCache | None
) -> FileReader | RemoteFiles:
    """Returns a reader of the record files `names` in `storage`; raises the errors of
    `open_records`."""
    if isinstance(storage, DirectoryStorage):
        return FileReader([storage.root / name for name in names])
    return RemoteFiles(names, storage=storage, cache=cache)


def fingerprint(reader: Reader) -> str:
    """Returns an identifier of a reader's data, equal for the same files locally and remotely.

    The identifier depends on each file's name, its header, and the position at which its last
    commit ends. In v1 the header contains the checksum of all metadata. In v2 the last 64 KiB
    before that position count, too. For a custom reader the identifier depends only on the number
    of samples.
    """
    digest = sha256(reader.n.to_bytes(8, "little"))
    if isinstance(reader, RemoteFiles | FileReader):
        for name in reader.fnames:
            digest.update(os.path.basename(name).encode() + b"\0")
        for part in reader.fingerprint():
            digest.update(part)
    return f"files:{digest.hexdigest()[:16]}"
