"""Record files at URLs: the reader's interface over range requests and a local chunk cache."""

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from fireflyer._native import crc32
from fireflyer._native.ffrecord import Arenas, check_samples
from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.chunk_cache import ChunkCache
from fireflyer.ffrecord.columns import Row, RowCodec, common_columns, decode_rows, stack
from fireflyer.ffrecord.integers import checked_integer
from fireflyer.ffrecord.paths import SUFFIX, PathName, is_url, record_path
from fireflyer.ffrecord.ranges import Retry
from fireflyer.ffrecord.reader import TAIL, FileReader, Indices, Sample, _index_array, file_changed
from fireflyer.ffrecord.remote_index import Entries, Indexes, open_remote
from fireflyer.ffrecord.spans import Numbers, SpanReader, Spans, map_in_threads
from fireflyer.ffrecord.zstd import ENTRY, expand
from fireflyer.storage import Storage, split_url, storage_at

_PIECE = 8 << 20
_BLOCK = 127 << 10  # number of samples whose index entries are read together
_TAILS = 64


@runtime_checkable
class Closable(Protocol):
    """Storage that has connections to close."""

    def close(self) -> None: ...


class RemoteFiles:
    """Random batch reads of record files through range requests; otherwise like `FileReader`.

    Any number of threads may use one reader, also after a fork. Unpickling reopens the files and
    rejects files that have changed.

    Args:
        fnames: a URL (fs3:///a.ffr, or any scheme of fsspec), a list of URLs, or the URL of a
            directory (all its `*.ffr` sorted by name); names inside `storage` if that is given.
        check_data: compare the CRC32 of every sample that is read. Cached data is always compared;
            wrong data is fetched again.
        storage: storage of the names; default: the storage of each URL.
        cache: keeps chunks of the files on a local disk.
        attempts: maximum number of requests for a range.
        backoff_s: pause before the second attempt in seconds; later pauses double.

    Attributes:
        n: number of samples in all files.
        fnames: the files, in the order of their samples.
        columns: name -> (dtype, shape) if the samples are rows, otherwise None.

    Raises:
        ConfigError: no file, a wrong suffix, an unknown scheme, or files with different columns.
        StorageError, Unavailable: a file cannot be opened.
        Corrupted: an index does not match its checksum or the size of its file.
    """

    def __init__(
        self,
        fnames: str | Iterable[str],
        check_data: bool = True,
        *,
        storage: Storage | None = None,
        cache: ChunkCache | None = None,
        attempts: int = 5,
        backoff_s: float = 0.1,
    ) -> None:
        self.check_data = bool(check_data)
        self._storage, self._cache = storage, cache
        self._retry = Retry(attempts=attempts, backoff_s=backoff_s)
        self._own: dict[str, Storage] = {}  # by URL: storages that this reader must close
        with ExitStack() as failed:
            failed.callback(self.close)
            self._open(fnames)
            failed.pop_all()

    def _open(self, fnames: str | Iterable[str]) -> None:
        places = self._places(fnames)
        opened = map_in_threads(lambda place: open_remote(place, self._cache, self._retry), places)
        files = [file for file, _ in opened]
        self.fnames = [file.shown for file in files]
        self._reader: SpanReader | None = SpanReader(files, self._cache, self._retry)
        self._indexes = Indexes([index for _, index in opened], self._reader)
        self._arenas = Arenas()
        self.n = int(self._indexes.starts[-1])
        self.columns = common_columns(
            (name, index.schema) for name, (_, index) in zip(self.fnames, opened, strict=True)
        )
        self._rows = None if self.columns is None else RowCodec(self.columns)

    def __len__(self) -> int:
        return self.n

    def read(self, indices: Indices) -> list[Sample]:
        """Returns the samples at `indices`, in that order, as writable views on one new arena.

        Raises:
            IndexError: an index is negative or not below `n`.
            TypeError: an index is not an integer, or is a bool.
            NoSpace: the batch is larger than the memory of the machine.
            Corrupted: a sample does not match its checksum, or its file was truncated.
            Unavailable: all attempts failed with transient errors.
            StorageError: a file is gone or not readable.
        """
        arena, offsets = self._read_batch(_index_array(indices))
        return [arena[start:end] for start, end in pairwise(offsets.tolist())]

    def read_one(self, index: int) -> Sample:
        """Returns the sample at `index`; raises what `read` does."""
        return self._read_batch(_index_array([checked_integer("an index", index)]))[0]

    def read_batch(self, indices: Indices) -> tuple[Sample, npt.NDArray[np.int64]]:
        """Returns the k samples at `indices` as one array and k + 1 offsets; raises as `read`."""
        return self._read_batch(_index_array(indices))

    def rows(self, indices: Indices) -> list[Row]:
        """Returns the rows at `indices`, as `FileReader.rows`.

        Raises:
            ConfigError: the files have no columns.
            Corrupted: also if the sizes in a row do not match its bytes.
            IndexError, Unavailable, StorageError: as `read`.
        """
        if self._rows is None:
            return decode_rows(None, (), str)
        return decode_rows(self._rows, self.read(indices), lambda j: self._named(int(indices[j])))

    def read_columns(self, indices: Indices) -> dict[str, Any]:
        """Returns the rows by column, as `FileReader.read_columns`; raises as `rows`."""
        return stack(self.columns or {}, self.rows(indices))

    def entries(self, indices: Indices) -> Entries:
        """Returns the index entries of the samples, as `FileReader.entries`; raises as `read`."""
        return self._located(_index_array(indices))[2]

    def versions(self) -> list[int]:
        """Returns the format version of each file."""
        return [2 if file.is_v2 else 1 for file in self._opened().files]

    def sizes(self) -> list[int]:
        """Returns the size in bytes of each file when it was opened."""
        return [file.size for file in self._opened().files]

    def validate(self, data: bool = True) -> None:
        """Checks the current content of all files, bypassing the cache.

        With `data=False`, checks only the metadata that opening reads.

        Raises:
            Corrupted: a file does not match its checksums.
            Unavailable, StorageError: a file cannot be read.
        """
        options: dict[str, Any] = {**self._options(), "cache": None}
        with type(self)(self._names(), True, **options) as fresh:
            for start in range(0, fresh.n if data else 0, _BLOCK):
                block = np.arange(start, min(start + _BLOCK, fresh.n))
                sizes = fresh._indexes.entries(*fresh._indexes.locate(block))["bytes"]
                groups = np.cumsum(sizes) // _PIECE
                for group in np.split(block, np.flatnonzero(np.diff(groups)) + 1):
                    fresh._read_stored(group)

    def get_offsets(self, file: int) -> npt.NDArray[np.int64]:
        """Returns the same positions as `FileReader.get_offsets`.
        For a v2 file this reads the whole index.
        """
        return np.append(self._column(file, "place"), np.int64(self._indexes.each[file].end))

    def get_checksums(self, file: int) -> npt.NDArray[np.uint32]:
        """Returns the stored CRC32 of each sample of file number `file`; reads a v2 index fully."""
        return self._column(file, "crc")

    def fingerprint(self) -> Iterator[bytes]:
        """Yields bytes that identify the files, as `FileReader.fingerprint` does.

        Raises what `read` does, because it reads the last bytes of v2 files.
        """
        reader = self._opened()
        for first in range(0, len(reader.files), _TAILS):
            files = reader.files[first : first + _TAILS]
            ends = [index.end for index in self._indexes.each[first : first + _TAILS]]
            wanted = [
                (number, max(0, end - TAIL), end)
                for number, (file, end) in enumerate(zip(files, ends, strict=True), first)
                if file.is_v2
            ]
            tails = iter(reader.fetch(wanted))
            for file, end in zip(files, ends, strict=True):
                tail = bytes(next(tails)) if file.is_v2 else b""
                yield struct.pack("<Q", end) + file.header + tail

    def close(self) -> None:
        """Closes the reader and the connections that it opened; may be called again."""
        self._reader = None
        while self._own:
            _, storage = self._own.popitem()
            if isinstance(storage, Closable):
                storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        digests = [file.digest for file in self._opened().files]
        return _reopen, (type(self), self._names(), self.check_data, self._options(), digests)

    def __repr__(self) -> str:
        return f"RemoteFiles({len(self.fnames)} files, {self.n} samples)"

    def _names(self) -> list[str]:
        return [file.name for file in self._opened().files] if self._storage else self.fnames

    def _options(self) -> dict[str, Any]:
        return {
            "storage": self._storage,
            "cache": self._cache,
            "attempts": self._retry.attempts,
            "backoff_s": self._retry.backoff_s,
        }

    def _places(self, fnames: str | Iterable[str]) -> list[tuple[Storage, str, str]]:
        """Returns (storage, name in it, display name) of each file."""
        names = [fnames] if isinstance(fnames, str) else list(fnames)
        if (storage := self._storage) is not None:
            found = [(storage, record_path(name), f"{storage}/{name}") for name in names]
        elif isinstance(fnames, str) and not fnames.endswith(SUFFIX):
            folder, inside = self._at(fnames, directory=True)
            listed = self._retry.run(lambda: folder.list(inside))
            chosen = [name for name in listed if name.endswith(SUFFIX) and name[0] != "."]
            before = f"{inside}/" if inside else ""
            shown = fnames if fnames.endswith("/") else f"{fnames}/"
            found = [(folder, before + name, shown + name) for name in chosen]
        else:
            found = [(*self._at(record_path(url)), url) for url in names]
        if not found:
            raise ConfigError(f"no '*{SUFFIX}' file in {fnames!r}")
        return found

    def _at(self, url: str, *, directory: bool = False) -> tuple[Storage, str]:
        root, name = split_url(_url(url), directory=directory)
        if root not in self._own:
            self._own[root] = self._retry.run(lambda: storage_at(root))
        return self._own[root], name

    def _opened(self) -> SpanReader:
        if self._reader is None:
            raise ValueError("the RemoteFiles are closed")
        return self._reader

    def _read_batch(self, wanted: npt.NDArray[np.int64]) -> tuple[Sample, npt.NDArray[np.int64]]:
        arena, offsets, entries = self._read_stored(wanted)
        return expand(arena, offsets, entries, lambda j: self._named(int(wanted[j])))

    def _read_stored(
        self, wanted: npt.NDArray[np.int64]
    ) -> tuple[Sample, npt.NDArray[np.int64], Entries]:
        """Reads samples in their stored form and checks them; returns arena, offsets and index
        entries."""
        reader = self._opened()
        numbers, _, entries = self._located(wanted)
        offsets = np.zeros(len(wanted) + 1, np.int64)
        np.cumsum(entries["bytes"], out=offsets[1:])
        arena = self._arenas.take(int(offsets[-1]))
        spans = Spans(numbers, np.ascontiguousarray(entries["place"]), offsets)
        reader.read(spans, arena)
        if self.check_data or reader.cache is not None:
            self._check(spans, arena, np.ascontiguousarray(entries["crc"]), wanted)
        return arena, offsets, entries

    def _located(self, wanted: npt.NDArray[np.int64]) -> tuple[Numbers, Numbers, Entries]:
        """Returns the file number, the number in that file and the index entry of each sample."""
        self._opened()
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < self.n):
            bad = wanted[(wanted < 0) | (wanted >= self.n)][0]
            raise IndexError(f"sample index {bad} is outside [0, {self.n})")
        numbers, samples = self._indexes.locate(wanted)
        return numbers, samples, self._indexes.entries(numbers, samples)

    def _check(
        self, spans: Spans, arena: Sample, crcs: npt.NDArray[np.uint32], wanted: Numbers
    ) -> None:
        """Compares samples with their CRC32; fetches wrong ones once more, without caching them."""
        wrong = np.flatnonzero(check_samples(arena, spans.offsets, crcs) == 0)
        if not wrong.size:
            return
        self._opened().read_again(spans, wrong, arena)
        for row in wrong.tolist() if self.check_data else ():
            sample = arena[spans.offsets[row] : spans.offsets[row + 1]]
            if crc32(sample.data) != int(crcs[row]):
                raise Corrupted(
                    f"{self._named(int(wanted[row]))} does not match its CRC32, "
                    "even when fetched again; do not trust this file"
                )

    def _column(self, file: int, field: str) -> npt.NDArray[Any]:
        """Returns one field of the index entries of all samples of a file."""
        index = self._indexes.each[file]
        column = np.empty(index.count, ENTRY[field])
        number = file % len(self.fnames)
        for start in range(0, index.count, _BLOCK):
            samples = np.arange(start, min(start + _BLOCK, index.count))
            entries = self._indexes.entries(np.full(len(samples), number), samples)
            column[start : start + len(samples)] = entries[field]
        return column

    def _named(self, index: int) -> str:
        numbers, samples = self._indexes.locate(np.array([index]))
        return f"record file '{self.fnames[int(numbers[0])]}', sample {int(samples[0])}"


Reader = FileReader | RemoteFiles


def _reopen(
    kind: type[RemoteFiles],
    names: list[str],
    check_data: bool,
    options: dict[str, Any],
    digests: list[bytes],
) -> RemoteFiles:
    reader = kind(names, check_data, **options)
    for file, before in zip(reader._opened().files, digests, strict=True):
        if file.digest != before:
            raise file_changed(file.shown)
    return reader


def open_records(
    fnames: PathName | Iterable[PathName],
    check_data: bool = True,
    *,
    cache: ChunkCache | None = None,
) -> Reader:
    """Opens record files anywhere: local files by `FileReader`, URLs by `RemoteFiles`.

    Args:
        fnames: a file, a list of files in the order of their samples, or a directory.
        check_data: compare the CRC32 of every sample that is read.
        cache: chunk cache for URLs.

    Raises:
        ConfigError: local paths and URLs are mixed, or no file is given. Also raises what these two
            classes raise.
    """
    if isinstance(fnames, str | os.PathLike):
        name = os.fspath(fnames)
        return (
            RemoteFiles(name, check_data, cache=cache)
            if is_url(name)
            else FileReader(name, check_data)
        )
    names = [os.fspath(name) for name in fnames]
    remote = [is_url(name) for name in names]
    if any(remote) and not all(remote):
        raise ConfigError("cannot mix local paths and URLs in one list of record files")
    return (
        RemoteFiles(names, check_data, cache=cache)
        if any(remote)
        else FileReader(names, check_data)
    )


def _url(text: str) -> str:
    if not is_url(text):
        raise ConfigError(f"{text!r} is not a URL: read local record files with FileReader")
    return text
