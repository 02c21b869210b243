"""Opening of stores and snapshots by URL."""

import os
from typing import TYPE_CHECKING, Literal, overload

from fireflyer._native.kv import BlockCache, View
from fireflyer.errors import KvError
from fireflyer.kv.core import pins
from fireflyer.kv.core.reader import Reader, no_store
from fireflyer.kv.core.tables import TableSet
from fireflyer.kv.core.writer import Settings
from fireflyer.kv.reading import Snapshot, reader_at
from fireflyer.kv.shell import run
from fireflyer.kv.store import ReadOnlyStore, Store
from fireflyer.storage import creates_exclusively, open_storage

if TYPE_CHECKING:
    from fireflyer.kv.pages.cache import PageCache

CACHE_BYTES = 256 << 20
SEGMENT_BYTES = 64 << 20


def is_missing(url: str | os.PathLike[str]) -> bool:
    """Returns whether the URL names a local folder that does not exist."""
    scheme, is_url, rest = os.fspath(url).partition("://")
    if is_url and scheme != "file":
        return False
    return not os.path.isdir(rest if is_url else url)


@overload
def open(
    url: str | os.PathLike[str], *, write: Literal[True], cache: int = ..., history: int = ...,
    memtable: int = ...,
) -> Store: ...  # fmt: skip
@overload
def open(
    url: str | os.PathLike[str], *, write: Literal[False] = ..., cache: int = ..., poll: float = ...
) -> ReadOnlyStore: ...
@overload
def open(url: str | os.PathLike[str], *, snapshot: str, cache: int = ...) -> Snapshot: ...
def open(
    url: str | os.PathLike[str],
    *,
    write: bool = False,
    snapshot: str | None = None,
    cache: int = CACHE_BYTES,
    poll: float = 0.01,
    history: int = 0,
    memtable: int = 32 << 20,
) -> Store | ReadOnlyStore | Snapshot:
    """Opens a store: a folder, fs3://HOST:PORT/PATH, fs3:///PATH, or a URL of fsspec.

    Args:
        write: become the only writer of the store, and create a missing store. The previous writer
            then gets `Stale`.
        snapshot: id of a snapshot to read instead of the newest state.
        cache: maximum bytes of cached table blocks.
        poll: for a reader: seconds between reads of the log; 0: only `refresh` reads it.
        history: for a writer: number of newest log objects to keep for `changes`, in addition to
            the ones that recovery needs.
        memtable: for a writer: bytes in memory after which a table is written.

    Raises:
        KvError: there is no store to read, or the storage cannot be written safely.
        SnapshotGone: the snapshot expired.
        Corrupted: the log or the manifest is damaged.
        Unavailable: no server answers.
    """
    if not write and is_missing(url):
        raise no_store(os.fspath(url))
    storage = open_storage(url)
    if cache < 0 or history < 0 or memtable < 1 << 10 or poll < 0:
        raise KvError(
            "invalid size: cache, history and poll are at least 0, memtable at least 1 KiB"
        )
    if snapshot is not None:
        if write:
            raise KvError("a snapshot cannot be written: leave write=True or snapshot= out")
        manifest = run(storage, pins.manifest_of(snapshot))
        view = View([], TableSet(BlockCache(cache)).runs(manifest), manifest.sequence)
        core = reader_at(manifest, view, manifest.sequence, Reader(BlockCache(0)))
        return Snapshot(storage, core, snapshot, True, 0.0)
    if not write:
        return ReadOnlyStore(storage, cache, poll)
    if not creates_exclusively(storage):
        raise KvError(
            f"{storage} cannot be written: its driver does not create files exclusively, so two writers "
            "would both win; use a folder or fs3, or open it without write=True"
        )
    return Store(storage, Settings(memtable=memtable, history=history), cache)


def cache(
    url: str | os.PathLike[str],
    capacity: int,
    *,
    segment: int = SEGMENT_BYTES,
    poll: float = 1.0,
) -> "PageCache":
    """Opens a page cache: a folder, fs3://HOST:PORT/PATH, fs3:///PATH, or a URL of fsspec.

    Any number of processes may open a cache. Each may write and evict; all must use the same
    capacity.

    Args:
        capacity: maximum bytes of its segments, at least 256 KiB.
        segment: bytes of a segment, which is one write; at most an eighth of the capacity.
        poll: seconds between searches for segments of other processes; 0: only `refresh` and writes
            search.

    Raises:
        KvError: a size is invalid.
        StorageError: the storage cannot be listed.
        Unavailable: no server answers.
    """
    from fireflyer.kv.pages.cache import PageCache, sizes_checked  # deferred: it needs numpy

    size = sizes_checked(capacity, segment, poll)
    return PageCache(open_storage(url), capacity, size, poll)
