"""Named byte files under one root: a local directory or an fsspec URL.

The module `protocol` defines the guarantees.
"""

from fireflyer.storage.directory import DirectoryStorage
from fireflyer.storage.protocol import (
    TEMPORARY_SUFFIX,
    Chunk,
    Range,
    Storage,
    creates_exclusively,
    read_each,
    read_shared,
    read_summed,
    reads_summed,
)
from fireflyer.storage.urls import FsspecStorage, open_storage, split_url, storage_at

__all__ = [
    "TEMPORARY_SUFFIX",
    "Chunk",
    "DirectoryStorage",
    "FsspecStorage",
    "Range",
    "Storage",
    "creates_exclusively",
    "open_storage",
    "read_each",
    "read_shared",
    "read_summed",
    "reads_summed",
    "split_url",
    "storage_at",
]
