"""Folder of experts, the cold tier: functions that add, pack, check, read and remove experts.

A folder is a directory or any other storage (fs3:///experts).
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fireflyer.errors import Corrupted, DamagedExpert, ExpertError, NoSuchExpert
from fireflyer.experts import manifest
from fireflyer.experts.manifest import FILE_SUFFIX, PIECE, SUFFIX, Manifest, Summed
from fireflyer.storage import Storage, open_storage, read_shared

if TYPE_CHECKING:
    from fireflyer.checkpoint.state.contents import Contents


def add(place: Storage | str, name: str, source: Any) -> Manifest:
    """Adds an expert durably.

    Args:
        place: the folder. A missing local folder is created after the name and the source were
            checked.
        source: a state (a dict of tensors), or the path of a safetensors file, of a Hugging Face
            folder of shards, of a DCP folder or of a torch.save file of plain data.

    Raises:
        ExpertError: an expert of this name exists.
        ConfigError: the name or the path cannot be used.
        CheckpointError: the state cannot be used.
        StorageError: a file cannot be read or written.
    """
    from fireflyer.checkpoint.formats import safetensors

    manifest.checked_name(name)
    passed = Summed(safetensors.stream(_contents(source)))
    storage = open_storage(place) if isinstance(place, str) else place
    if storage.size(name + SUFFIX) is not None:
        raise ExpertError(f"{storage} has an expert {name} already: remove it first")
    storage.write(name + FILE_SUFFIX, passed)
    found = passed.manifest(name + FILE_SUFFIX)
    storage.write(name + SUFFIX, [found.encode()])
    return found


def _contents(source: Any) -> "Contents":
    from fireflyer.checkpoint.formats import safetensors
    from fireflyer.checkpoint.state.contents import InMemory

    if not isinstance(source, str | os.PathLike):
        return InMemory(source)
    if os.fspath(source).endswith(FILE_SUFFIX):
        return safetensors.SafetensorsFiles(os.fspath(source))
    # Imported only here, because the import takes seconds.
    from fireflyer.checkpoint.formats import interchange

    return interchange.open_foreign(source)


def pack(storage: Storage) -> Iterator[tuple[str, Manifest]]:
    """Makes experts of the folder's safetensors files that have no manifest.

    The function writes a manifest for each file, and changes no existing file. It yields the name
    and the manifest of each new expert.

    Raises:
        Corrupted: a file is no safetensors file.
        StorageError: a file cannot be read.
        ConfigError: the name of a file is no valid name of an expert.
    """
    known = set(manifest.names(storage))
    for file in storage.list():
        name = file.removesuffix(FILE_SUFFIX)
        if not file.endswith(FILE_SUFFIX) or name in known:
            continue
        manifest.checked_name(name)
        check_header(storage, file)
        passed = Summed(manifest.pieces(storage, file))
        for _ in passed:
            pass
        found = passed.manifest(file)
        storage.write(name + SUFFIX, [found.encode()])
        yield name, found


def check_header(storage: Storage, file: str) -> None:
    """Checks that a file is a safetensors file.

    Raises:
        Corrupted: the file has another format.
    """
    from fireflyer.checkpoint.formats import safetensors

    size = storage.size(file) or 0
    where = f"{storage}/{file}"
    head = storage.read(file, 0, 8)
    length = safetensors.header_bytes(where, head, size)
    safetensors.parse_header(where, storage.read(file, 8, length), size)


def check(storage: Storage, name: str) -> Manifest:
    """Reads all bytes of an expert and verifies its checksums.

    Raises:
        NoSuchExpert, DamagedExpert, StorageError.
    """
    found = manifest.read(storage, name)
    memory = bytearray(found.size)
    read_into(storage, name, found, memoryview(memory))
    return found


def read_into(storage: Storage, name: str, known: Manifest, memory: memoryview) -> None:
    """Reads an expert into memory and verifies its checksums.

    Args:
        memory: writable, contiguous memory of the expert's size. Unless the memory is a shared
            mapping, the process must not fork meanwhile. After an error the memory's content is
            undefined.

    Raises:
        NoSuchExpert: the expert was removed.
        DamagedExpert: the bytes do not match; the message names the expert and the file.
        StorageError: the expert cannot be read.
    """
    whole = np.frombuffer(memory, np.uint8)
    rows = np.zeros((len(known.crc32), 4), np.int64)
    rows[:, 1] = np.arange(len(rows)) * PIECE
    rows[:, 2] = np.minimum(PIECE, known.size - rows[:, 1])
    rows[:, 3] = whole.ctypes.data + rows[:, 1]
    try:
        size = storage.size(known.file)
        if size is None and storage.size(name + SUFFIX) is None:
            raise NoSuchExpert(f"{storage} has no expert {name} any more", name)
        if size != known.size:
            raise Corrupted(f"{storage}/{known.file} has {size} bytes, not {known.size}")
        read_shared(storage, [known.file], rows, np.array(known.crc32, np.uint32))
    except Corrupted as error:
        raise DamagedExpert(f"expert {name} is damaged: {error}; add it again", name) from error


def remove(storage: Storage, name: str) -> None:
    """Removes an expert: first its manifest, then its file.

    Raises:
        NoSuchExpert: there is no such expert.
        StorageError: the expert cannot be removed.
    """
    try:
        file = manifest.read(storage, name).file
    except DamagedExpert:
        file = name + FILE_SUFFIX
    storage.delete(name + SUFFIX)
    storage.delete(file)
