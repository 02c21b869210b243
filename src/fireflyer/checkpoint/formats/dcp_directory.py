"""Directories in torch.distributed.checkpoint's own format, read without running their pickle.

.metadata       a pickle of the contents: for each key a tensor's dtype, shape and chunks, or a mark
                for an object; file, offset and length of each chunk or object; the keys on the path
                to each item
__0_0.distcp    torch.save of each chunk or object, back to back
"""

import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fireflyer.checkpoint.formats.dcp_keys import DcpKeys, safely_loaded, tree_of
from fireflyer.checkpoint.state.boxes import Box, flaw, intersection, split_rows, whole
from fireflyer.checkpoint.state.contents import (
    Contents,
    InMemory,
    fill,
    load,
    nbytes_of,
    pieces_of_bytes,
)
from fireflyer.checkpoint.state.leaves import byte_view, new_local
from fireflyer.checkpoint.state.tree import Node, Path, Tensor, path_name
from fireflyer.errors import CheckpointError, Corrupted, StorageError
from fireflyer.storage import DirectoryStorage
from fireflyer.torch_internals.checkpoint import StorageInfo

METADATA = ".metadata"
_CHUNK_BYTES = 16 << 20
PATH_MAX = 4096
"""Maximum number of characters of a path in the metadata."""
_VERSION = "1.0.0"
"""Version that DCP of torch 2.13 writes."""


class _Facts:
    """Passive stand-in for a pickled object; holds the object's data and has no behaviour."""

    held: Any = None

    def __setstate__(self, state: Any) -> None:
        self.held = state

    def get(self, name: str) -> Any:
        if not isinstance(self.held, dict):
            raise TypeError(f"{type(self).__name__} holds {type(self.held).__name__}")
        return self.held[name]


class _Metadata(_Facts):
    pass


class _Tensor(_Facts):
    pass


class _Bytes(_Facts):
    pass


class _Index(_Facts):
    def __hash__(self) -> int:
        return hash((self.get("fqn"), self.held.get("offset")))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and all(
            self.held.get(name) == other.held.get(name) for name in ("fqn", "offset")
        )


def _dtype_name(name: str) -> Callable[[], str] | str | None:
    return name if isinstance(getattr(torch, name, None), torch.dtype) else None


def _member(enum: object, name: object) -> str:
    """Replaces getattr, which pickles of some Python 3.11 releases call for enum members. Returns the
    member's name and looks nothing up."""
    if enum is not int or not isinstance(name, str):
        raise pickle.UnpicklingError("it names builtins.getattr")
    return name


def _path(*parts: str) -> str:
    path = "/".join(parts)
    if len(path) > PATH_MAX:  # a path of paths could otherwise double in length without end
        raise pickle.UnpicklingError(f"it holds a path of {len(path)} characters")
    return path


def _layout_name(name: object) -> str:
    if not isinstance(name, str):
        raise pickle.UnpicklingError("it names a layout that is no text")
    return name


_META = "torch.distributed.checkpoint.metadata"
_KNOWN: dict[tuple[str, str], Any] = {
    (_META, "Metadata"): _Metadata,
    (_META, "TensorStorageMetadata"): _Tensor,
    (_META, "BytesStorageMetadata"): _Bytes,
    (_META, "ChunkStorageMetadata"): _Facts,
    (_META, "TensorProperties"): _Facts,
    (_META, "MetadataIndex"): _Index,
    (_META, "StorageMeta"): _Facts,
    (_META, "_MEM_FORMAT_ENCODING"): int,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Facts,
    ("builtins", "getattr"): _member,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _layout_name,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
}


def _refuse_bytearray(unpickler: object) -> None:
    raise pickle.UnpicklingError("it holds a bytearray")


class _Restricted(pickle._Unpickler):
    """Unpickler that accepts only dtypes and the names in `_KNOWN`, and creates stand-ins for
    these.

    The base class is the pure-Python unpickler, in which only the opcode BYTEARRAY8 reserves memory
    by a length that the file names.
    """

    # The C unpickler allocates as much memory as numbers in the file request: for the memo by an
    # index, for bytes by a length. In the Python unpickler only BYTEARRAY8 does so. The other
    # opcodes with a length call `read`, which returns at most the rest of the file.
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BYTEARRAY8[0]: _refuse_bytearray,
    }

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is None and module == "torch":
            found = _dtype_name(name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


class _Blob(NamedTuple):
    """Location of the bytes that torch.save wrote for a chunk or object."""

    file: str
    offset: int
    length: int


class DcpDirectory(Contents):
    """Contents of a directory that `dcp.save` wrote. Objects are held in memory, tensors are
    not."""

    def __init__(self, source: str | FilePath) -> None:
        """Reads the metadata and all objects.

        Raises:
            Corrupted: if the metadata or an object is damaged; the error names the flaw.
            CheckpointError: if an object contains more than data; the error names its key.
            StorageError: if the directory cannot be read.
        """
        self._source = FilePath(source)
        if not (self._source / METADATA).is_file():
            raise StorageError(f"cannot read {self._source}: it has no {METADATA}")
        self._storage = DirectoryStorage(self._source)
        self._chunks: dict[Path, dict[Box, _Blob]] = {}
        self._objects: dict[Path, tuple[InMemory, Tensor]] = {}
        try:
            metadata = _Restricted(io.BytesIO(self._storage.read(METADATA))).load()
            self.nodes = self._nodes(metadata)
        except (CheckpointError, StorageError):
            raise
        except Exception as error:  # a damaged pickle may raise anything
            reason = str(error) or type(error).__name__
            raise Corrupted(f"{self._source}/{METADATA}: {reason}") from error

    def __str__(self) -> str:
        return str(self._source)

    def _nodes(self, metadata: _Facts) -> list[Node]:
        paths = metadata.held.get("planner_data") or {}
        blobs = _blobs(metadata.get("storage_data"))
        items: dict[str, list[Node]] = {}
        for key, found in metadata.get("state_dict_metadata").items():
            place = tuple(paths.get(key, (key,)))
            if isinstance(found, _Tensor):
                items[key] = [self._tensor(key, place, found, blobs)]
            else:
                held = InMemory(safely_loaded(key, self._bytes(blobs[key, None])), key)
                self._objects |= {(*place, *one.path): (held, one) for one in held.tensors}
                items[key] = list(held.nodes)
        return tree_of(items, paths)

    def _tensor(self, key: str, place: Path, found: _Tensor, blobs: Mapping[Any, _Blob]) -> Tensor:
        dtype, shape = found.get("properties").held[0], found.get("size")
        new_local("torch", dtype, (0,))
        chunks: dict[Box, _Blob] = {}
        for chunk in found.get("chunks"):
            box = Box(chunk.get("offsets"), chunk.get("sizes"))
            if math.prod(box.shape):
                chunks[box] = blobs[key, box.offsets]
        if problem := flaw(shape, list(chunks)):
            raise Corrupted(f"{self._source}/{METADATA}: {key}: {problem}")
        self._chunks[place] = chunks
        return Tensor(path=(), kind="torch", dtype=dtype, shape=shape, pieces=())

    def _bytes(self, blob: _Blob) -> bytes:
        size = self._storage.size(blob.file)
        if size is None or not 0 <= blob.offset <= blob.offset + blob.length <= size:
            raise Corrupted(f"{self._source}/{blob.file} has no bytes at {blob.offset}")
        return self._storage.read(blob.file, blob.offset, blob.length)

    def boxes(self, node: Tensor) -> list[Box]:
        if node.path in self._objects:
            return super().boxes(node)
        return list(self._chunks[node.path])

    def read(self, node: Tensor, box: Box) -> Iterator[memoryview]:
        held = self._objects.get(node.path)
        if held is not None:
            yield from held[0].read(held[1], box)
            return
        chunks = self._chunks[node.path]
        if box in chunks:
            yield from pieces_of_bytes(self._chunk(node, box))
            return
        gathered = torch.empty(box.shape, dtype=getattr(torch, node.dtype))
        for chunk in chunks:
            common = intersection(chunk, box)
            if common is not None:
                part = self._chunk(node, chunk)[common.within(chunk).slices]
                gathered[common.within(box).slices].copy_(part)
        yield from pieces_of_bytes(gathered)

    def _chunk(self, node: Tensor, box: Box) -> torch.Tensor:
        blob = self._chunks[node.path][box]
        name = path_name(node.path)
        found = safely_loaded(name, self._bytes(blob))
        if (
            not isinstance(found, torch.Tensor)
            or tuple(found.shape) != box.shape
            or str(found.dtype) != f"torch.{node.dtype}"
        ):
            raise Corrupted(
                f"{self._source}/{blob.file}: bytes {blob.offset} to {blob.offset + blob.length} "
                f"do not hold the expected {node.dtype} {list(box.shape)} (tensor {name})"
            )
        return found


def _blobs(storage_data: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], _Blob]:
    found = {}
    for index, info in storage_data.items():
        file, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if type(file) is not str or "/" in file or file in ("", ".", ".."):
            raise ValueError(f"{file!r} does not name a file in the same folder")
        if info.held.get("transform_descriptors"):
            raise CheckpointError(f"{file} is transformed by {info.get('transform_descriptors')}")
        found[index.get("fqn"), index.held.get("offset")] = _Blob(file, int(offset), int(length))
    return found


def write(
    contents: Contents, out: str | FilePath, advance: Callable[[int], None] = lambda _: None
) -> None:
    """Writes a directory that `dcp.load` reads: one data file, tensors in chunks of about 16 MiB.

    Args:
        advance: progress callback; receives numbers of written bytes.

    Raises:
        CheckpointError: if the state is not a dict, or two items would have one key.
        StorageError: if the contents cannot be read or written.
    """
    storage = DirectoryStorage(FilePath(out))
    keys = DcpKeys(str(contents), contents.nodes)
    kinds: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    data: dict[MetadataIndex, StorageInfo] = {}

    def stored() -> Iterator[memoryview]:
        end = 0
        for index, item in _exported(contents, keys, kinds):
            file = io.BytesIO()
            torch.save(item, file)
            view = file.getbuffer()
            data[index] = StorageInfo("__0_0.distcp", end, len(view))
            end += len(view)
            yield view
            advance(item.nbytes if isinstance(item, torch.Tensor) else 0)

    storage.write("__0_0.distcp", stored())
    metadata = Metadata(
        kinds,
        planner_data=keys.paths,
        storage_data=data,
        storage_meta=StorageMeta(),
        version=_VERSION,
    )
    storage.write(METADATA, [pickle.dumps(metadata)])


def _exported(
    contents: Contents,
    keys: DcpKeys,
    kinds: dict[str, TensorStorageMetadata | BytesStorageMetadata],
) -> Iterator[tuple[MetadataIndex, Any]]:
    """Yields chunks and objects with their places; fills `kinds` for each key."""
    for key in keys.objects:
        kinds[key] = BytesStorageMetadata()
        loaded = {node.path: load(contents, node) for node in keys.tensors_within(key)}
        yield MetadataIndex(key), keys.assembled(key, loaded)
    for key, node in keys.tensors.items():
        dtype = getattr(torch, node.dtype)
        boxes = split_rows(whole(node.shape), max(1, nbytes_of(node) // _CHUNK_BYTES))
        chunks = [
            ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.shape)) for one in boxes
        ]
        kinds[key] = TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(node.shape), chunks
        )
        for number, box in enumerate(boxes):
            chunk = torch.empty(box.shape, dtype=dtype)
            if box.elements:
                fill(byte_view(chunk).reshape(-1), contents.read(node, box))
            yield MetadataIndex(key, box.offsets, number), chunk
