"""Record files at URLs: the reader's interface over range requests and a local cache of chunks."""

import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fireflyer._native import crc32
from fireflyer._native.ffrecord import Arenas, check_samples
from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.chunks import ChunkCache
from fireflyer.ffrecord.columns import Row, RowCodec, common_columns, decode_rows, stack
from fireflyer.ffrecord.paths import SUFFIX, record_path
from fireflyer.ffrecord.ranges import Retry
from fireflyer.ffrecord.reader import TAIL, Indices, Sample, _index_array, not_the_same
from fireflyer.ffrecord.remote_index import Entries, Indexes, open_remote
from fireflyer.ffrecord.spans import Numbers, SpanReader, Spans, side_by_side
from fireflyer.ffrecord.whole import whole
from fireflyer.ffrecord.zstd import ENTRY, expand
from fireflyer.storage import FsspecStorage, Storage

_PIECE = 8 << 20
_BLOCK = 127 << 10  # samples whose index entries are looked at together
_TAILS = 64


class RemoteFiles:
    """Random batch reads of record files that are reached by range requests; else as `FileReader`.

    Any number of threads may use one; it works on after a fork; unpickling opens the files again, and
    refuses others than those.

    Args:
        fnames: a URL, a list of URLs, or the URL of a directory (all its `*.ffr` sorted by name); names
            inside `storage` if that is given.
        check_data: compare the CRC32 of every sample that is read. What comes from the cache is compared
            in any case, and fetched anew if it is wrong.
        storage: where the names are; by default fsspec's file system for each URL.
        cache: keeps chunks of the files on a local disk.
        attempts: how often a range is asked for.
        backoff_s: pause before the second attempt in seconds; later ones double.

    Attributes:
        n: number of samples in all files.
        fnames: the files, in the order of their samples.
        columns: name -> (dtype, shape) of files whose samples are rows, else None.

    Raises:
        ConfigError: no file, a wrong suffix, an unknown scheme, or files of different columns.
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
        places = _places(fnames, storage, self._retry)
        opened = side_by_side(lambda place: open_remote(place, cache, self._retry), places)
        files = [file for file, _ in opened]
        self.fnames = [file.shown for file in files]
        self._reader: SpanReader | None = SpanReader(files, cache, self._retry)
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
        """The samples at `indices`, in that order, as writable views on one new arena.

        Raises:
            IndexError: an index is negative or not below `n`.
            TypeError: an index is no integer; a bool is none.
            NoSpace: the batch is larger than the memory of the machine.
            Corrupted: a sample does not match its checksum, or its file was truncated.
            Unavailable: the place answered with transient errors until the attempts ran out.
            StorageError: a file is gone or may not be read.
        """
        arena, offsets = self._read_batch(_index_array(indices))
        return [arena[start:end] for start, end in pairwise(offsets.tolist())]

    def read_one(self, index: int) -> Sample:
        """The sample at `index`; raises what `read` does."""
        return self._read_batch(_index_array([whole("an index", index)]))[0]

    def read_batch(self, indices: Indices) -> tuple[Sample, npt.NDArray[np.int64]]:
        """The k samples at `indices` as one array and its k + 1 offsets; raises what `read` does."""
        return self._read_batch(_index_array(indices))

    def rows(self, indices: Indices) -> list[Row]:
        """The rows at `indices`, as `FileReader.rows`.

        Raises:
            ConfigError: the files have no columns.
            Corrupted: also when the sizes in a row do not fit its bytes.
            IndexError, Unavailable, StorageError: as `read`.
        """
        if self._rows is None:
            return decode_rows(None, (), str)
        return decode_rows(self._rows, self.read(indices), lambda j: self._named(int(indices[j])))

    def read_columns(self, indices: Indices) -> dict[str, Any]:
        """The rows at `indices` by columns, as `FileReader.read_columns`; raises what `rows` does."""
        return stack(self.columns or {}, self.rows(indices))

    def validate(self, data: bool = True) -> None:
        """Checks all files as they are now, past the cache; with `data=False` only what opening reads.

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
        """Start of each sample of file number `file` in bytes, then the end of its last commit.

        Of a v2 file this reads the whole index.
        """
        return np.append(self._column(file, "place"), np.int64(self._indexes.each[file].end))

    def get_checksums(self, file: int) -> npt.NDArray[np.uint32]:
        """CRC32 of each sample of file number `file`, as it is stored; of a v2 file by the whole index."""
        return self._column(file, "crc")

    def fingerprint(self) -> Iterator[bytes]:
        """Tells these files from others, as `FileReader.fingerprint` does.

        Raises:
            What `read` does, for the ends of v2 files.
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
        """Reading ends; may be called again."""
        self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        told = [file.told for file in self._opened().files]
        return _reopen, (type(self), self._names(), self.check_data, self._options(), told)

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
        """The samples as they are stored, checked, and their index entries."""
        reader = self._opened()
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < self.n):
            bad = wanted[(wanted < 0) | (wanted >= self.n)][0]
            raise IndexError(f"sample index {bad} is outside [0, {self.n})")
        numbers, samples = self._indexes.locate(wanted)
        entries = self._indexes.entries(numbers, samples)
        offsets = np.zeros(len(wanted) + 1, np.int64)
        np.cumsum(entries["bytes"], out=offsets[1:])
        arena = self._arenas.take(int(offsets[-1]))
        spans = Spans(numbers, np.ascontiguousarray(entries["place"]), offsets)
        reader.read(spans, arena)
        if self.check_data or reader.cache is not None:
            self._check(spans, arena, np.ascontiguousarray(entries["crc"]), wanted)
        return arena, offsets, entries

    def _check(
        self, spans: Spans, arena: Sample, crcs: npt.NDArray[np.uint32], wanted: Numbers
    ) -> None:
        """Compares samples with their CRC32; those that differ are fetched once more and not kept."""
        wrong = np.flatnonzero(check_samples(arena, spans.offsets, crcs) == 0)
        if not wrong.size:
            return
        self._opened().read_again(spans, wrong, arena)
        for row in wrong.tolist() if self.check_data else ():
            sample = arena[spans.offsets[row] : spans.offsets[row + 1]]
            if crc32(sample.data) != int(crcs[row]):
                raise Corrupted(
                    f"{self._named(int(wanted[row]))} does not match its CRC32, "
                    "also when fetched again; do not trust this file"
                )

    def _column(self, file: int, field: str) -> npt.NDArray[Any]:
        """One field of the index entries of all samples of a file."""
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


def _reopen(
    kind: type[RemoteFiles],
    names: list[str],
    check_data: bool,
    options: dict[str, Any],
    told: list[bytes],
) -> RemoteFiles:
    reader = kind(names, check_data, **options)
    for file, before in zip(reader._opened().files, told, strict=True):
        if file.told != before:
            raise not_the_same(file.shown)
    return reader


def _places(
    fnames: str | Iterable[str], storage: Storage | None, retry: Retry
) -> list[tuple[Storage, str, str]]:
    """(storage, name in it, name to show) of each file."""
    names = [fnames] if isinstance(fnames, str) else list(fnames)
    if storage is not None:
        found = [(storage, record_path(name), f"{storage}/{name}") for name in names]
    elif isinstance(fnames, str) and not fnames.endswith(SUFFIX):
        directory: Storage = FsspecStorage(_url(fnames))
        listed = [n for n in retry.run(directory.list) if n.endswith(SUFFIX) and n[0] != "."]
        found = [(directory, name, f"{fnames.rstrip('/')}/{name}") for name in listed]
    else:
        parents: dict[str, Storage] = {}
        found = []
        for url in names:
            parent, _, name = _url(record_path(url)).rpartition("/")
            if parent not in parents:
                parents[parent] = FsspecStorage(parent)
            found.append((parents[parent], name, url))
    if not found:
        raise ConfigError(f"no '*{SUFFIX}' file in {fnames!r}")
    return found


def _url(text: str) -> str:
    if "://" not in text:
        raise ConfigError(f"{text!r} is not a URL: read local record files with FileReader")
    return text
