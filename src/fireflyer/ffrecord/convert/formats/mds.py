"""MDS, the shards of mosaicml-streaming: `index.json` and `*.mds` files.

A shard holds the number of samples (u32), a table of positions (u32[number + 1]), the settings as
JSON, and the samples. The table gives the position of each sample in the file, and of the file's
end. A sample holds u32 sizes of the columns without a fixed size, then the data of all columns.
Pickles are never loaded.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.formats.decompress import decompressed
from fireflyer.ffrecord.convert.source import Column, Row, checked, chosen, read_file

_SCALARS = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
_TYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
"""Dtype by the code in the first byte of an array whose encoding names no dtype."""
_PLAIN_BYTES = ("bytes", "jpeg", "png")
_PLAIN_TEXT = ("str", "json", "str_int", "str_float", "str_decimal")

_Decode = Callable[[bytes], Any]


class _File(msgspec.Struct):
    basename: str
    bytes: int = 0


class _Shard(msgspec.Struct):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    samples: int
    raw_data: _File
    format: str
    compression: str | None = None
    zip_data: _File | None = None


class _Index(msgspec.Struct):
    version: int
    shards: list[_Shard]


class MdsSource:
    """Folder with `index.json`; a shard that exists only compressed is decompressed in memory."""

    def __init__(
        self, folder: str | os.PathLike[str], columns: Sequence[str] | None = None
    ) -> None:
        """Reads the index and the first sample; decodes only the columns `columns`.

        Raises:
            ConfigError: columns with pickles or raw PIL images, an unknown compression, or a
                compression without its package.
            Corrupted: the data is damaged, or not MDS.
            StorageError: the data cannot be read.
        """
        self.name = os.fspath(folder)
        self.paths: tuple[str, ...] = (self.name,)
        self._folder = Path(folder)
        text = read_file(self._folder / "index.json")
        try:
            self._shards = msgspec.json.decode(text, type=_Index).shards
        except (msgspec.DecodeError, RecursionError) as error:
            raise Corrupted(f"{self.name}/index.json is not an index of MDS: {error}") from error
        if not self._shards:
            raise ConfigError(f"{self.name}: it holds no shards")
        for shard in self._shards:
            self._check(shard)
        self.length: int | None = sum(shard.samples for shard in self._shards)
        shard = self._shards[0]
        encodings = dict(zip(shard.column_names, shard.column_encodings, strict=True))
        wanted = chosen(encodings, columns, self.name)
        self._decoders = {name: self._decoder(encodings[name]) for name in wanted}
        first = next(self._samples(), None)
        if first is None:
            raise ConfigError(f"{self.name}: it holds no samples")
        self.columns = tuple(_column(name, encodings[name], first[name]) for name in wanted)

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        for number, row in enumerate(self._samples()):
            yield checked(row, self.columns, f"{self.name}, sample {number}")

    def _check(self, shard: _Shard) -> None:
        name, first = shard.raw_data.basename, self._shards[0]
        for file in (shard.raw_data, *([shard.zip_data] if shard.zip_data else [])):
            called = file.basename
            if called in ("", ".", "..") or "/" in called or "\0" in called or shard.samples < 0:
                raise Corrupted(f"{self.name}/index.json: invalid shard name {called!r}")
        if shard.format != "mds" or len(shard.column_sizes) != len(shard.column_names):
            raise Corrupted(f"{self.name}/index.json: shard {name!r} is not of the format mds")
        if len(shard.column_encodings) != len(shard.column_names) or not shard.column_names:
            raise Corrupted(f"{self.name}/index.json: shard {name!r} has columns without encoding")
        mine = (shard.column_names, shard.column_encodings, shard.column_sizes)
        if mine != (first.column_names, first.column_encodings, first.column_sizes):
            raise ConfigError(f"{self.name}: shard {name!r} has other columns than the first shard")
        if shard.compression and not (self._folder / name).exists() and shard.zip_data is None:
            raise Corrupted(f"{self.name}/index.json: shard {name!r} names no compressed file")

    def _bytes(self, shard: _Shard) -> memoryview:
        """Returns the bytes of a shard. The format allows 4 GiB; writers make 64 MiB by default."""
        path = self._folder / shard.raw_data.basename
        if shard.zip_data is None or path.exists():
            return memoryview(read_file(path))
        packed = self._folder / shard.zip_data.basename
        return memoryview(decompressed(packed, shard.compression or "", shard.raw_data.bytes))

    def _decoder(self, encoding: str) -> _Decode:
        kind, _, rest = encoding.partition(":")
        if kind in _PLAIN_BYTES:
            return bytes
        if kind in _PLAIN_TEXT:
            return lambda data: data.decode()
        if kind in _SCALARS or kind == "int":
            dtype = np.dtype("int64" if kind == "int" else kind)
            return lambda data: np.frombuffer(data, dtype).reshape(())
        if kind == "ndarray":
            dtype_name, _, sizes = rest.partition(":")
            if dtype_name in ("", *_SCALARS) and all(s.isdigit() for s in sizes.split(",") if s):
                shape = tuple(int(size) for size in sizes.split(",")) if sizes else None
                return lambda data: _array(data, dtype_name, shape)
        raise ConfigError(
            f"{self.name}: unsupported column encoding {encoding!r}: "
            "use bytes, str, a number or an ndarray"
        )

    def _samples(self) -> Iterator[Row]:
        for shard in self._shards:
            path = self._folder / shard.raw_data.basename
            data = self._bytes(shard)
            for number, (start, end) in enumerate(_bounds(data, shard.samples, path)):
                try:
                    yield self._sample(data[start:end], shard)
                except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
                    raise Corrupted(f"{path}, sample {number} is damaged: {error}") from error

    def _sample(self, data: memoryview, shard: _Shard) -> Row:
        free = sum(size is None for size in shard.column_sizes)
        sizes = iter(np.frombuffer(data[: 4 * free], "<u4").tolist())
        at = 4 * free
        row: Row = {}
        for name, fixed in zip(shard.column_names, shard.column_sizes, strict=True):
            size = next(sizes, None) if fixed is None else fixed
            if size is None or size < 0 or at + size > len(data):
                raise ValueError(f"column {name!r} is longer than the sample")
            if name in self._decoders:
                row[name] = self._decoders[name](bytes(data[at : at + size]))
            at += size
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes after the last column")
        return row


def _bounds(data: memoryview, samples: int, path: Path) -> Iterator[tuple[int, int]]:
    head = 4 * (samples + 2)
    if len(data) < head or int.from_bytes(data[:4], "little") != samples:
        raise Corrupted(f"{path}: it does not hold the {samples} samples of index.json")
    starts = np.frombuffer(data[4:head], "<u4").astype(np.int64)
    if starts[0] < head or starts[-1] != len(data) or (np.diff(starts) < 0).any():
        raise Corrupted(f"{path}: its table of samples is damaged, or the file is cut")
    yield from zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)


def _array(data: bytes, dtype: str, shape: tuple[int, ...] | None) -> np.ndarray[Any, Any]:
    at = 0
    if not dtype:
        dtype, at = _TYPES[data[0]], 1
    if shape is None:
        axes, width = data[at] >> 2, 1 << (data[at] & 3)
        end = at + 1 + axes * width
        sizes = np.frombuffer(data[at + 1 : end], f"<u{width}").tolist()
        if len(sizes) != axes:
            raise ValueError("the shape of an array is truncated")
        shape, at = tuple(sizes), end
    return np.frombuffer(data[at:], np.dtype(dtype).newbyteorder("<")).reshape(shape)


def _column(name: str, encoding: str, value: Any) -> Column:
    if isinstance(value, bytes):
        return Column(name, "bytes")
    if isinstance(value, str):
        return Column(name, "str")
    fixed = encoding.count(":") == 2
    return Column(name, value.dtype.name, value.shape if fixed else (None,) * value.ndim)
