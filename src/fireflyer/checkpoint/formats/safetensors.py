"""safetensors files, written and read as streams, in one file or in Hugging Face's shards.

    8 bytes: header length | header: JSON, padded with spaces | the tensors' bytes, without gaps

A tensor's name is the readable form of its path (`model.wte.weight`, `layers[0].bias`). One key of
the metadata holds the state's nodes as JSON text, with values, key types and order, so that a round
trip is lossless. The key is in the header, or in the index if there are shards. If a file lacks the
key, the loaded state is a dict of tensors by name. A dtype that the format lacks is stored as U8
with an additional last dimension for the element's bytes.
"""

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fireflyer.checkpoint.state.boxes import Box, position, whole
from fireflyer.checkpoint.state.contents import (
    STREAM_BYTES,
    Contents,
    InMemory,
    itemsize_of,
    nbytes_of,
    unflatten_or_corrupted,
)
from fireflyer.checkpoint.state.tree import Container, Node, Tensor, path_name
from fireflyer.errors import CheckpointError, Corrupted, StorageError
from fireflyer.storage import DirectoryStorage

KEY = "fireflyer"
"""Metadata key of the state's nodes."""

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
SUFFIX = ".safetensors"
MOST_HEADER_BYTES = 100_000_000
"""Maximum size of a header, set by the format."""

_TORCH = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32",
    "uint32": "U32", "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_DTYPES = {stored: name for name, stored in _TORCH.items()}
_NUMPY = {
    "|b1": "BOOL", "|u1": "U8", "|i1": "I8", "<i2": "I16", "<u2": "U16", "<i4": "I32", "<u4": "U32",
    "<i8": "I64", "<u8": "U64", "<f2": "F16", "<f4": "F32", "<f8": "F64", "<c8": "C64",
}  # fmt: skip
_PLAIN_NAME = re.compile(r"[^/\\\0]+")


class Entry(msgspec.Struct, frozen=True):
    """Entry of a tensor in a header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Text(msgspec.Struct, frozen=True):
    """Content of the text under KEY."""

    nodes: tuple[Node, ...]
    version: int = 1


class _Shard(NamedTuple):
    name: str
    tensors: list[Tensor]


def save(state: Any, out: str | FilePath, *, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Writes a state of this process; see `write`."""
    return write(InMemory(state), out, shard_bytes=shard_bytes)


def load(source: str | FilePath) -> Any:
    """Loads the state of a file, or of a folder of shards, into memory.

    Raises:
        Corrupted: if the data is damaged; the error names the file and its flaw.
        StorageError: if the data cannot be read.
        CheckpointError: if this build of torch lacks a dtype.
    """
    return SafetensorsFiles(source).state()


def write(
    contents: Contents,
    out: str | FilePath,
    *,
    one_file: bool | None = None,
    shard_bytes: int = SHARD_BYTES,
    advance: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Writes any contents to the file `out`, or into the folder `out`.

    The folder then has either model.safetensors, or an index and shards. A shard has at most
    `shard_bytes`, or one larger tensor. The index is written last.

    Args:
        one_file: True if `out` is a file. None means True if the name of `out` ends in
            .safetensors.
        advance: progress callback; receives numbers of written bytes.

    Returns:
        The paths of the files.

    Raises:
        CheckpointError: if two tensors have one name, or the header becomes too large.
        StorageError: if the contents cannot be read or written; a new folder is removed again.
    """
    path = FilePath(out)
    one = path.suffix == SUFFIX if one_file is None else one_file
    folder = path.parent if one else path
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        return _write(contents, path, one, shard_bytes, advance)
    except BaseException:
        with contextlib.suppress(OSError):
            for file in folder.glob("*.safetensors") if new else ():
                file.unlink()
            for each in new:
                each.rmdir()
        raise


def _write(
    contents: Contents,
    path: FilePath,
    one: bool,
    shard_bytes: int,
    advance: Callable[[int], None],
) -> list[str]:
    names = _names(contents)
    text = _text(contents)
    if one:
        storage, shards = DirectoryStorage(path.parent), [_Shard(path.name, contents.tensors)]
    else:
        storage, shards = DirectoryStorage(path), _shards(contents.tensors, shard_bytes)
    single = len(shards) == 1
    for shard in shards:
        metadata = {"format": "pt"} | ({KEY: text} if single else {})
        storage.write(shard.name, _file(contents, names, shard.tensors, metadata, advance))
    found = [str(storage.root / shard.name) for shard in shards]
    if not single:
        places = {names[node.path]: shard.name for shard in shards for node in shard.tensors}
        total = sum(nbytes_of(node) for node in contents.tensors)
        index = {"metadata": {"total_size": total, KEY: text}, "weight_map": places}
        storage.write(INDEX, [json.dumps(index, indent=2).encode()])
        found.append(str(storage.root / INDEX))
    return found


def _names(contents: Contents) -> dict[Any, str]:
    names: dict[Any, str] = {}
    taken: set[str] = set()
    for node in contents.tensors:
        name = path_name(node.path)
        if name == "__metadata__":
            raise CheckpointError(
                f"a tensor of {contents} has the name {name}, which safetensors reserves"
            )
        if name in taken:
            raise CheckpointError(f"two tensors of {contents} would have the name {name}")
        taken.add(name)
        names[node.path] = name
    return names


def _text(contents: Contents) -> str:
    nodes = tuple(
        Tensor(path=node.path, kind=node.kind, dtype=node.dtype, shape=node.shape, pieces=())
        if isinstance(node, Tensor)
        else node
        for node in contents.nodes
    )
    return msgspec.json.encode(_Text(nodes)).decode()


def _shards(tensors: Sequence[Tensor], shard_bytes: int) -> list[_Shard]:
    groups: list[list[Tensor]] = [[]]
    filled = 0
    for node in tensors:
        size = nbytes_of(node)
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(node)
        filled += size
    if len(groups) == 1:
        return [_Shard("model.safetensors", groups[0])]
    count = len(groups)
    return [
        _Shard(f"model-{number:05d}-of-{count:05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def _stored(node: Tensor) -> tuple[str, tuple[int, ...]]:
    """Returns dtype and shape in the format's terms."""
    found = (_TORCH if node.kind == "torch" else _NUMPY).get(node.dtype)
    return (found, node.shape) if found is not None else ("U8", (*node.shape, itemsize_of(node)))


def stream(contents: Contents) -> Iterator[bytes | memoryview]:
    """Yields the bytes of one file that holds these contents.

    Raises:
        CheckpointError: if two tensors have one name, or the header becomes too large.
        StorageError: if the contents cannot be read.
    """
    metadata = {"format": "pt", KEY: _text(contents)}
    return _file(contents, _names(contents), contents.tensors, metadata, lambda _: None)


def _file(
    contents: Contents,
    names: Mapping[Any, str],
    tensors: Sequence[Tensor],
    metadata: dict[str, str],
    advance: Callable[[int], None],
) -> Iterator[bytes | memoryview]:
    # Tensors with the largest elements come first, so that each is aligned to its element size.
    ordered = sorted(tensors, key=lambda node: -itemsize_of(node))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for node in ordered:
        dtype, shape = _stored(node)
        offsets = (end, end + nbytes_of(node))
        header[names[node.path]] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        end = offsets[1]
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    if len(data) > MOST_HEADER_BYTES:
        raise CheckpointError(
            f"{contents} has {len(data)} bytes of names and plain values, but "
            f"a safetensors header has at most {MOST_HEADER_BYTES}"
        )
    yield len(data).to_bytes(8, "little") + data
    for node in ordered:
        for part in contents.read(node, whole(node.shape)) if nbytes_of(node) else ():
            yield part
            advance(len(part))


def header_bytes(where: str, head: bytes | memoryview, size: int) -> int:
    """Returns the length of a header from the first 8 bytes of a file.

    Args:
        where: the file, for messages.
        size: bytes of the file.

    Raises:
        Corrupted: the file cannot have such a header.
    """
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(MOST_HEADER_BYTES, size - 8):
        raise Corrupted(f"{where}: a header of {length} bytes in a file of {size}")
    return length


def parse_header(
    where: str, data: bytes | memoryview, size: int
) -> tuple[dict[str, str], dict[str, Entry]]:
    """Returns the metadata and the tensors of a header; the tensors fill the file without gaps.

    Raises:
        Corrupted: if the header is invalid; the error names the flaw.
    """
    try:
        text = bytes(data)
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        json.loads(text, object_pairs_hook=_unique)
        metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(each, type=Entry) for name, each in raw.items()}
    except (ValueError, RecursionError) as error:  # ValueError includes msgspec's errors
        raise Corrupted(f"{where}: invalid header: {error}") from error
    _check_entries(where, entries, size - 8 - len(text))
    return metadata, entries


def dtype_name(entry: Entry) -> str:
    """Returns torch's name of the dtype of a checked entry."""
    return _DTYPES[entry.dtype]


class _Place(NamedTuple):
    file: str
    offset: int
    entry: Entry


class SafetensorsFiles(Contents):
    """A file, a folder with an index, or a folder of files. The constructor checks all headers."""

    def __init__(self, source: str | FilePath) -> None:
        """Opens the files and checks their headers.

        Raises:
            Corrupted: if a header is damaged; the error names the file and its flaw.
            StorageError: if a file cannot be read.
        """
        path = FilePath(source)
        if not path.exists():
            raise StorageError(f"cannot read {path}: there is no such file or folder")
        self._source = path
        self._storage = DirectoryStorage(path if path.is_dir() else path.parent)
        text, self._places = self._find(path)
        self._by_path: dict[Any, _Place] = {}
        self.nodes = self._plain_nodes() if text is None else self._nodes_of(text)

    def __str__(self) -> str:
        return str(self._source)

    def _find(self, path: FilePath) -> tuple[str | None, dict[str, _Place]]:
        if not path.is_dir():
            return self._header(path.name)
        if (path / INDEX).exists():
            return self._indexed()
        files = [name for name in self._storage.list() if name.endswith(".safetensors")]
        if not files:
            raise StorageError(f"{path} has no .safetensors file")
        text: str | None = None
        places: dict[str, _Place] = {}
        for file in files:
            found, more = self._header(file)
            text = found if len(files) == 1 else None
            if both := places.keys() & more.keys():
                raise Corrupted(f"{path}: two files contain the tensor {min(both)}")
            places |= more
        return text, places

    def _indexed(self) -> tuple[str | None, dict[str, _Place]]:
        where = f"{self._source}/{INDEX}"
        try:
            index = json.loads(self._storage.read(INDEX), object_pairs_hook=_unique)
            text = index.get("metadata", {}).get(KEY)
            wanted = index["weight_map"]
            if not isinstance(wanted, dict):
                raise TypeError("its weight_map is not an object")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Corrupted(f"{where}: it is not an index: {error}") from error
        headers: dict[str, dict[str, _Place]] = {}
        places: dict[str, _Place] = {}
        for name, file in wanted.items():
            if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file) or file in (".", ".."):
                raise Corrupted(f"{where}: {file!r} does not name a file in the same folder")
            if file not in headers:
                headers[file] = self._header(file)[1]
            if name not in headers[file]:
                raise Corrupted(f"{where}: {file} has no tensor {name}")
            places[name] = headers[file][name]
        return text if isinstance(text, str) else None, places

    def _header(self, file: str) -> tuple[str | None, dict[str, _Place]]:
        where = f"{self._storage}/{file}"
        size = self._storage.size(file)
        if size is None:
            raise Corrupted(f"{where} is missing")
        length = header_bytes(where, self._storage.read(file, 0, 8), size)
        metadata, entries = parse_header(where, self._storage.read(file, 8, length), size)
        places = {name: _Place(file, 8 + length, entry) for name, entry in entries.items()}
        return metadata.get(KEY), places

    def _plain_nodes(self) -> list[Node]:
        nodes: list[Node] = [Container(path=(), kind="dict")]
        for name, place in self._places.items():
            self._by_path[(name,)] = place
            dtype = _DTYPES[place.entry.dtype]
            nodes.append(
                Tensor(path=(name,), kind="torch", dtype=dtype, shape=place.entry.shape, pieces=())
            )
        return nodes

    def _nodes_of(self, text: str) -> list[Node]:
        try:
            found = msgspec.json.decode(text, type=_Text)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise Corrupted(f"{self}: its text {KEY!r}: {error}") from error
        if found.version != 1:
            raise CheckpointError(f"{self}: its text {KEY!r} has version {found.version}, not 1")
        left = dict(self._places)
        for node in found.nodes:
            if not isinstance(node, Tensor):
                continue
            place = left.pop(path_name(node.path), None)
            if place is None or _stored(node) != (place.entry.dtype, place.entry.shape):
                raise Corrupted(
                    f"{self}: the metadata key {KEY!r} lists the tensor {path_name(node.path)}, "
                    "which the files lack or store with another dtype or shape"
                )
            self._by_path[node.path] = place
        if left:
            raise Corrupted(f"{self}: its text {KEY!r} does not mention {min(left)}")
        # Rejects nodes that do not form a tree now, rather than after hours of streaming.
        empty = {node.path: np.empty(0) for node in found.nodes if isinstance(node, Tensor)}
        unflatten_or_corrupted(str(self), found.nodes, empty)
        return list(found.nodes)

    def read(self, node: Tensor, box: Box) -> Iterator[memoryview]:
        place = self._by_path[node.path]
        size = itemsize_of(node)
        start = place.offset + place.entry.data_offsets[0] + position(box, whole(node.shape)) * size
        stop = start + box.elements * size
        for first in range(start, stop, STREAM_BYTES):
            data = np.empty(min(STREAM_BYTES, stop - first), np.uint8).data
            self._storage.read_into(place.file, first, data)
            yield data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object's pairs as a dict.

    Raises:
        ValueError: if a key occurs twice, because parsers disagree on which value counts.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"it has {twice!r} twice")
    return found


def _check_entries(where: str, entries: Mapping[str, Entry], data_bytes: int) -> None:
    """Checks the dtypes and shapes of a header, and that its tensors fill the data without gaps.

    Raises:
        Corrupted: if one of them is invalid, or the tensors leave a gap or overlap.
    """
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise Corrupted(f"{where}: {name} has the unknown dtype {entry.dtype!r}")
        room = math.prod(max(extent, 1) for extent in entry.shape)
        if min(entry.shape, default=0) < 0 or len(entry.shape) > 64 or room >= 1 << 59:
            raise Corrupted(f"{where}: {name} has the shape {list(entry.shape)}")
        probe = Tensor(path=(name,), kind="torch", dtype=dtype, shape=entry.shape, pieces=())
        start, stop = entry.data_offsets
        if start != end or stop - start != nbytes_of(probe):
            raise Corrupted(
                f"{where}: {name} of {nbytes_of(probe)} bytes has bytes {start} to {stop}, but "
                f"the previous tensor ends at {end}"
            )
        end = stop
    if end != data_bytes:
        raise Corrupted(f"{where}: its tensors end at byte {end} of {data_bytes}")
