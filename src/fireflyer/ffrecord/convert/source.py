"""Common model of all formats: named columns and rows."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np

from fireflyer.errors import ConfigError, StorageError
from fireflyer.ffrecord import columns

Row = dict[str, Any]
"""Mapping from column to value: bytes, str, a numpy array (a scalar has shape ()), None, or plain
nested values.
"""

NESTED = "msgpack"
"""Dtype of columns of nested values."""

READ_AHEAD = 4
"""Number of rows that each reading thread may be ahead of the writer."""


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a source or of a record file.

    Attributes:
        dtype: numpy's name of a fixed-size type, or "str", "bytes" or "msgpack" (`NESTED`).
        shape: None is a size that differs from row to row; () for scalars, "str", "bytes" and
            "msgpack".
        nullable: a value may be None; a "msgpack" value may always be None.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    nullable: bool = False

    @property
    def written(self) -> str:
        """Dtype as a schema writes it: "int64?" if nullable."""
        return columns.Column(self.dtype, self.shape, self.nullable).written

    @property
    def text(self) -> str:
        """Type for display, e.g. "uint8[?, ?, 3]"."""
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.written}[{sizes}]" if self.shape else self.written

    def joined(self, other: "Column") -> "Column | None":
        """Returns a column that holds the values of both columns; None if no column can."""
        if NESTED in (self.dtype, other.dtype) and self.name == other.name:
            return Column(self.name, NESTED)
        if replace(self, nullable=other.nullable) != other:
            return None
        return replace(self, nullable=self.nullable or other.nullable)


class Source(Protocol):
    """Rows of one data set.

    Attributes:
        name: name for messages and titles.
        length: number of rows; None if the number is unknown before all rows are read.
        columns: columns of every row; `rows` raises for a row with other columns.
        paths: files and folders that the source reads, as the caller named them.
    """

    name: str
    length: int | None
    columns: tuple[Column, ...]
    paths: tuple[str, ...]

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        """Yields all rows in order; up to `jobs` threads read ahead if the format allows it.

        Raises:
            ConfigError: a row does not fit the columns.
            Corrupted: the bytes are damaged or not of this format.
            StorageError: the source cannot be read.
        """
        ...


def ahead(load: Callable[[int], Row], length: int, jobs: int) -> Iterator[Row]:
    """Yields load(0), load(1) ... in order; `jobs` threads compute a bounded number ahead."""
    if jobs <= 1:
        yield from map(load, range(length))
        return
    indices = iter(range(length))
    with ThreadPoolExecutor(jobs, thread_name_prefix="ffrecord-read") as pool:
        waiting: deque[Future[Row]] = deque(
            pool.submit(load, index) for index in islice(indices, jobs * READ_AHEAD)
        )
        try:
            while waiting:
                row = waiting.popleft().result()
                waiting.extend(pool.submit(load, index) for index in islice(indices, 1))
                yield row
        finally:
            for future in waiting:
                future.cancel()


class Chain:
    """Concatenation of sources with the same columns.

    A column may be nullable in some of the sources only. A column that is nested in some of the
    sources is nested in the result.
    """

    def __init__(self, sources: Sequence[Source], name: str | None = None) -> None:
        """Joins the columns of the sources.

        Raises:
            ConfigError: the columns of two sources differ.
        """
        first = sources[0]
        columns: list[Column] = list(first.columns)
        for other in sources[1:]:
            both = zip(columns, other.columns, strict=False)
            joined = [one.joined(another) for one, another in both]
            columns = [column for column in joined if column is not None]
            if not len(columns) == len(first.columns) == len(other.columns):
                raise ConfigError(
                    f"{other.name} has columns {describe(other.columns)}, {first.name} has "
                    f"{describe(first.columns)}: pack them separately"
                )
        self._sources = sources
        self.name = name or f"{first.name} and {len(sources) - 1} more"
        self.columns = tuple(columns)
        self.paths = tuple(path for source in sources for path in source.paths)
        lengths = [source.length for source in sources]
        known = [length for length in lengths if length is not None]
        self.length = sum(known) if len(known) == len(lengths) else None

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        for source in self._sources:
            yield from source.rows(jobs)


class Selected:
    """Source with a selection of another source's columns."""

    def __init__(self, source: Source, names: Sequence[str]) -> None:
        """Selects the columns `names`.

        Raises:
            ConfigError: the source lacks a column.
        """
        known = {column.name: column for column in source.columns}
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{source.name} has no column {name!r}: it has {describe(source.columns)}"
                )
        self._source = source
        self.name, self.length, self.paths = source.name, source.length, source.paths
        self.columns = tuple(known[name] for name in dict.fromkeys(names))

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        for row in self._source.rows(jobs):
            yield {column.name: row[column.name] for column in self.columns}


def chosen(names: Iterable[str], wanted: Sequence[str] | None, where: str) -> tuple[str, ...]:
    """Returns the names that `wanted` selects; None selects all.

    Sources call this before they read types, so an unselected column cannot cause an error.

    Raises:
        ConfigError: a wanted name is missing.
    """
    names = tuple(names)
    for name in wanted or ():
        if name not in names:
            raise ConfigError(f"{where} has no column {name!r}: it has {', '.join(names)}")
    return names if wanted is None else tuple(name for name in names if name in wanted)


def describe(columns: Iterable[Column]) -> str:
    return ", ".join(f"{column.name}: {column.text}" for column in columns)


def checked(row: Mapping[str, Any], columns: Sequence[Column], where: str) -> Row:
    """Returns `row` with its values converted to the types of `columns`, if that changes no value.

    Raises:
        ConfigError: a column is missing or unexpected, or a value does not fit its type or shape.
    """
    if row.keys() != {column.name for column in columns}:
        raise ConfigError(
            f"{where} has columns {', '.join(map(str, row))}, but the rows before it have "
            f"{', '.join(column.name for column in columns)}: all rows need the same columns"
        )
    return {column.name: value_of(row[column.name], column, where) for column in columns}


def value_of(value: Any, column: Column, where: str) -> Any:
    """Returns `value` as the type of its column; raises what `checked` does."""
    if column.dtype == NESTED or (value is None and column.nullable):
        return value
    if column.dtype == "bytes":
        if isinstance(value, bytes | bytearray | memoryview):
            return value
    elif column.dtype == "str":
        if isinstance(value, str):
            return value
    else:
        array = as_array(value)
        target = np.dtype(column.dtype)
        if array is not None and not array.size and isinstance(value, list | tuple):
            array = array.astype(target)  # numpy makes an empty list a float64 array
        fits = array is not None and len(array.shape) == len(column.shape)
        if fits and array is not None and np.can_cast(array.dtype, target, "safe"):
            pairs = zip(array.shape, column.shape, strict=True)
            if all(asked is None or size == asked for size, asked in pairs):
                made = np.ascontiguousarray(array, target).reshape(array.shape)
                # numpy calls the cast from int64 to float64 safe, although it rounds integers
                # beyond 2**53.
                if target.kind not in "fc" or array.dtype.kind not in "iu":
                    return made
                if np.array_equal(made.real.astype(array.dtype), array):
                    return made
    raise ConfigError(
        f"{where}: column {column.name!r} is {column.text}, this value is {kind_of(value)}"
    )


def as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Returns numbers as an array, without a copy if possible; None for anything else.

    Python numbers become int64, float64 or bool. Tensors are converted by `__array__`.
    """
    if isinstance(value, str | bytes | bytearray | memoryview | dict) or value is None:
        return None
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return array if array.dtype.kind in "biufc" else None


def column_of(name: str, value: Any, where: str, *, free: bool = False) -> Column:
    """Returns a column for `value`; with `free`, the column accepts arrays of any sizes.

    Raises:
        ConfigError: no column can hold the value.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return Column(name, "bytes")
    if isinstance(value, str):
        return Column(name, "str")
    array = as_array(value)
    if array is None:
        raise ConfigError(
            f"{where}: column {name!r} is {kind_of(value)}, which a column cannot store: "
            "use bytes, text, numbers or arrays of numbers"
        )
    dtype = array.dtype.newbyteorder("<").name
    return Column(name, dtype, tuple(None if free else size for size in array.shape))


def is_unicode(text: str) -> bool:
    """Returns whether UTF-8 can hold the text: it has no lone surrogate."""
    return text == text.encode(errors="replace").decode()


def kind_of(value: Any) -> str:
    array = as_array(value)
    if array is not None:
        return f"{array.dtype.name}{list(array.shape)}" if array.shape else array.dtype.name
    return "None" if value is None else type(value).__name__


def reading(path: str | os.PathLike[str], error: OSError) -> StorageError:
    return StorageError(f"cannot read {os.fspath(path)!r}: {error.strerror or error}")


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Returns the content of a file.

    Raises:
        StorageError: the file cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError as error:
        raise reading(path, error) from error
