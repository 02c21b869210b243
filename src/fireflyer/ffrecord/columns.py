"""Typed columns: encode a row (a dict of arrays) as a sample (docs/internals/ffrecord-v2.md)."""

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from fireflyer.errors import ConfigError, Corrupted

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Part = Buffer | npt.NDArray[Any]

_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_NESTED = "msgpack"
_TEXT = ("str", "bytes", _NESTED)
"""Types of columns whose values are bytes of any length, without a shape."""
_MAX_SCHEMA = 1 << 20
_ALIGN = 8
_FIELD_NAME = re.compile(":[^:]*:")


class Column(NamedTuple):
    """Type of one column: a numpy dtype's name, `str`, `bytes` or `msgpack`, and a shape.

    A size of None differs from row to row. A nullable column may hold None; the schema writes its
    dtype with a trailing "?". A `msgpack` value is None, bool, int, float, str or bytes; or a list
    of such values, or a dict of them with str keys, nested to any depth.
    """

    dtype: str
    shape: tuple[int | None, ...] = ()
    nullable: bool = False

    @property
    def written(self) -> str:
        """Dtype as a schema writes it."""
        return f"{self.dtype}?" if self.nullable else self.dtype

    @property
    def open_sizes(self) -> int:
        """Number of sizes that each row stores, because the schema does not fix them."""
        return 1 if self.dtype in _TEXT else sum(size is None for size in self.shape)


Columns = dict[str, Column]
ColumnsLike = Mapping[str, str | tuple[str, Sequence[int | None]]]
Row = dict[str, Any]


def without_objects(data: Any) -> memoryview:
    """Returns `data` as a view of its bytes.

    Raises:
        TypeError: `data` is not a buffer, or its items are Python objects, which are addresses.
    """
    view = memoryview(data)
    if "O" in view.format and "O" in _FIELD_NAME.sub("", view.format):
        raise TypeError("a buffer of Python objects cannot be stored: their bytes are addresses")
    return view


def columns_of(given: ColumnsLike) -> Columns:
    """Checks columns: name -> dtype, or name -> (dtype, shape); "int64?" is a nullable int64.

    Raises:
        ConfigError: an unknown dtype, an invalid shape, or no column.
    """
    columns: Columns = {}
    for name, value in given.items():
        written, shape = (value, ()) if isinstance(value, str) else value
        nullable = str(written).endswith("?")
        dtype = written[:-1] if nullable else written
        if not isinstance(name, str) or not name:
            raise ConfigError(f"invalid column name {name!r}: expected text that is not empty")
        if dtype not in _DTYPES + _TEXT:
            raise ConfigError(
                f"column '{name}': invalid dtype {dtype!r}: expected one of {', '.join(_DTYPES + _TEXT)}"
            )
        if nullable and dtype == _NESTED:
            raise ConfigError(f"column '{name}': remove the '?': msgpack always allows None")
        sizes = tuple(shape)
        if any(s is not None and (type(s) is not int or not 0 <= s < 1 << 40) for s in sizes):
            raise ConfigError(f"column '{name}': invalid shape {shape!r}")
        # The bound of `wide` makes numpy accept any batch of arrays, even if a size is 0.
        wide = math.prod(size for size in sizes if size) >= 1 << 40
        if (dtype in _TEXT and sizes) or len(sizes) > 32 or wide:
            raise ConfigError(f"column '{name}': invalid shape {shape!r} for {dtype}")
        columns[name] = Column(dtype, sizes, nullable)
    if not columns:
        raise ConfigError("invalid columns: expected at least one")
    return columns


def to_json(columns: Columns) -> bytes:
    entries = [{"name": n, "dtype": c.written, "shape": list(c.shape)} for n, c in columns.items()]
    text = json.dumps({"columns": entries}, ensure_ascii=False).encode()
    if len(text) > _MAX_SCHEMA:
        raise ConfigError(f"the columns take {len(text)} bytes, at most {_MAX_SCHEMA} are allowed")
    return text


def from_json(text: bytes) -> Columns:
    """Returns the columns of a schema; raises ValueError if it is invalid."""
    try:
        entries = json.loads(text)["columns"]
        columns = columns_of({e["name"]: (e["dtype"], e["shape"]) for e in entries})
    except (ConfigError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"its schema is invalid ({error})") from error
    if len(columns) != len(entries):
        raise ValueError("its schema names a column twice")
    return columns


class RowCodec:
    """Codec between rows of one schema and bytes.

    A row starts with the u64 sizes that the schema leaves open. Each nullable column stores 1, or 0
    for None, before its sizes. Then follows the data of each column, each at a multiple of 8,
    padded with zeros to a multiple of 8.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        count = sum(column.open_sizes + column.nullable for column in columns.values())
        self._sizes = struct.Struct(f"<{count}Q")
        self._dtypes = {
            name: np.dtype(np.uint8 if c.dtype in _TEXT else c.dtype).newbyteorder("<")
            for name, c in columns.items()
        }

    def encode(self, row: Mapping[str, Any]) -> list["Part"]:
        """Returns the parts of the bytes of `row`.

        Raises:
            ValueError: other columns, another shape, or values that the dtype cannot hold.
            TypeError: a value that is neither an array of the dtype's kind nor text.
        """
        if row.keys() != self.columns.keys():
            differ = sorted(map(str, row.keys() ^ self.columns.keys()))
            raise ValueError(f"the columns of a row are not those of the file: {', '.join(differ)}")
        sizes: list[int] = []
        parts: list[Part] = [b""]
        for name, column in self.columns.items():
            if column.nullable:
                sizes.append(row[name] is not None)
                if row[name] is None:
                    sizes += [0] * column.open_sizes
                    continue
            data = self._data(name, column, row[name])
            size = memoryview(cast("Buffer", data)).nbytes
            if column.dtype in _TEXT:
                sizes.append(size)
            else:
                shape = cast("npt.NDArray[Any]", data).shape
                sizes += [s for s, want in zip(shape, column.shape, strict=True) if want is None]
            if size:
                parts.append(data)
            if size % _ALIGN:
                parts.append(bytes(-size % _ALIGN))
        parts[0] = self._sizes.pack(*sizes)
        return parts

    def _data(self, name: str, column: Column, value: Any) -> "Part":
        if column.dtype == "str":
            if not isinstance(value, str):
                raise TypeError(f"column '{name}' needs str, not {type(value).__name__}")
            try:
                return value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"column '{name}' needs valid Unicode text: {error.reason}"
                ) from error
        if column.dtype == _NESTED:
            return _packed(name, value)
        if column.dtype == "bytes":
            if not isinstance(value, bytes | bytearray | memoryview):
                raise TypeError(f"column '{name}' needs bytes, not {type(value).__name__}")
            return without_objects(value).tobytes()
        try:
            given = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"column '{name}' needs {column.dtype}: {error}") from error
        dtype = self._dtypes[name]
        wanted = column.shape
        fits = len(given.shape) == len(wanted) and all(
            want in (None, size) for size, want in zip(given.shape, wanted, strict=True)
        )
        if not fits:
            raise ValueError(f"column '{name}' has the shape {wanted}, not {given.shape}")
        if given.dtype == dtype:
            # np.ascontiguousarray would turn a scalar into an array of shape (1,).
            return np.asarray(given, order="C")
        if given.dtype.kind not in "biufc":
            raise TypeError(f"column '{name}' needs {column.dtype}, not {given.dtype}")
        kept = dtype.kind not in "fc" or np.can_cast(given.dtype, dtype, "same_kind")
        if kept:
            with np.errstate(all="ignore"):
                array = given.real.astype(dtype) if dtype.kind in "biu" else given.astype(dtype)
            if dtype.kind in "fc" and not _as_finite(array, given):
                raise ValueError(
                    f"column '{name}' is {column.dtype}, in which a {given.dtype} value would become infinite"
                )
            kept = dtype.kind in "fc" or np.array_equal(array, given)
        if not kept:
            raise ValueError(f"column '{name}' is {column.dtype}, which cannot hold {given.dtype}")
        return np.asarray(array, order="C")

    def decode(self, data: npt.NDArray[np.uint8]) -> Row:
        """Decodes the row in `data`; arrays are views of `data`.

        Raises:
            ValueError: the sizes in the row do not match its bytes.
        """
        position = self._sizes.size
        if position > data.size:
            raise ValueError(f"{data.size} bytes are too few for its sizes")
        sizes = iter(self._sizes.unpack_from(cast("Buffer", data)))
        row: Row = {}
        for name, column in self.columns.items():
            if column.nullable:
                there = next(sizes)
                if there not in (0, 1):
                    raise ValueError(f"column '{name}' has an invalid presence flag")
                if not there:
                    if any(next(sizes) for _ in range(column.open_sizes)):
                        raise ValueError(f"column '{name}' is None, but has a size")
                    row[name] = None
                    continue
            dtype = self._dtypes[name]
            if column.dtype in _TEXT:
                shape: tuple[int, ...] = (next(sizes),)
            else:
                shape = tuple(next(sizes) if size is None else size for size in column.shape)
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes > data.size - position:
                raise ValueError(f"column '{name}' of shape {shape} is longer than the row")
            array: npt.NDArray[Any] = np.ndarray(shape, dtype, data, position)
            if column.dtype == "str":
                row[name] = array.tobytes().decode()
            elif column.dtype == "bytes":
                row[name] = array.tobytes()
            elif column.dtype == _NESTED:
                row[name] = _unpacked(name, array.tobytes())
            else:
                row[name] = array
            position += nbytes + -nbytes % _ALIGN
        if position != data.size:
            raise ValueError(f"its columns take {position} of its {data.size} bytes")
        return row


def _packed(name: str, value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value, enc_hook=_plain)
    except (TypeError, RecursionError) as error:
        raise TypeError(f"column '{name}' needs nested lists of plain values: {error}") from error
    except (OverflowError, UnicodeEncodeError) as error:
        raise ValueError(f"column '{name}' cannot encode the value: {error}") from error


def _plain(value: Any) -> Any:
    """Converts a numpy array or number among nested values to lists or a Python number."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return value.tolist()
    raise TypeError(f"unsupported {type(value).__name__}")


def _unpacked(name: str, data: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise ValueError(f"column '{name}' is not valid MessagePack: {error}") from error


def _as_finite(array: npt.NDArray[Any], given: npt.NDArray[Any]) -> bool:
    """Returns whether no finite number became infinite."""
    finite = np.isfinite(array)
    return bool(finite.all()) or np.array_equal(finite, np.isfinite(given))


def common_columns(schemas: Iterable[tuple[str, bytes]]) -> Columns | None:
    """Returns the columns that all files share; None if the files have no columns.

    Args:
        schemas: name and schema (empty without columns) of each file.

    Raises:
        Corrupted: a schema is invalid.
        ConfigError: two files have different columns.
    """
    common: Columns | None = None
    first = None
    for name, schema in schemas:
        try:
            columns = from_json(schema) if schema else None
        except ValueError as error:
            raise Corrupted(f"record file '{name}' is damaged: {error}") from error
        if first is not None and columns != common:
            raise ConfigError(
                f"record files '{first}' and '{name}' have different columns: read them separately"
            )
        common, first = columns, first if first is not None else name
    return common


def decode_rows(
    codec: RowCodec | None,
    samples: Iterable[npt.NDArray[np.uint8]],
    name_of: Callable[[int], str],
) -> list[Row]:
    """Decodes the rows in samples; `name_of(j)` names sample j in an error.

    Raises:
        ConfigError: `codec` is None, because the files have no columns.
        Corrupted: the sizes in a row do not match its bytes.
    """
    if codec is None:
        raise ConfigError("these record files have no columns: use read")
    found = []
    for number, data in enumerate(samples):
        try:
            found.append(codec.decode(data))
        except ValueError as error:
            raise Corrupted(
                f"{name_of(number)} is damaged: {error}; write it again or restore it from a copy"
            ) from error
    return found


def stack(columns: Columns, rows: list[Row]) -> dict[str, Any]:
    """Returns rows by column: an array (rows, *shape) for a fixed shape, otherwise a list."""
    batch: dict[str, Any] = {}
    for name, column in columns.items():
        values = [row[name] for row in rows]
        fixed = not (column.dtype in _TEXT or column.nullable or None in column.shape)
        if fixed:
            shape = (len(rows), *(size or 0 for size in column.shape))
            stacked = np.empty(shape, np.dtype(column.dtype))
            batch[name] = np.stack(values, out=stacked) if values else stacked
        else:
            batch[name] = values
    return batch
