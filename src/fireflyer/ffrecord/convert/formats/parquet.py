"""Parquet and Arrow files, read with pyarrow if it is installed."""

import importlib
import os
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.source import NESTED, Column, Row, reading

_BATCH = 1024

_STRINGS = ("string", "large_string", "string_view")
_BINARIES = ("binary", "large_binary", "fixed_size_binary", "binary_view")

_Path = tuple[str, ...]
"""Name of a column, then of nested struct fields."""


class ParquetSource:
    """Parquet file, or Arrow IPC file or stream (`.arrow`, `.feather`).

    Integers, floats and bools keep their type. Strings and binaries become str and bytes, lists of
    numbers arrays, and each struct field a column, e.g. `image.bytes`. Dictionaries are replaced by
    their values, timestamps by the int64 count of their own unit. A column with nulls is nullable.
    All other lists, lists with nulls inside and ragged nested lists become nested values. The right
    type depends on the values, so columns with other than nested values are read twice.
    """

    length: int | None
    columns: tuple[Column, ...]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the schema and scans the columns.

        Raises:
            ConfigError: pyarrow is not installed, or a column has an unsupported type.
            Corrupted: the file is damaged, or has another format.
            StorageError: the file cannot be read.
        """
        self.name = os.fspath(path)
        self.paths: tuple[str, ...] = (self.name,)
        self._arrow = need("pyarrow", f"reading {self.name}")
        self._compute = need("pyarrow.compute", self.name)
        self._parquet = self.name.endswith((".parquet", ".pq"))
        fields = self._guarded(lambda: list(self._flat(self._schema(), ())))
        if not fields:
            raise ConfigError(f"{self.name}: it holds no columns")
        names = [column.name for _, column in fields]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"{self.name}: two columns would have the name {name!r}: rename one of them"
                )
        self.length, self._fields = self._guarded(lambda: self._scanned(fields))
        self.columns = tuple(column for _, column in self._fields)

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        first = 0
        with closing(self._batches(None)) as batches:
            while (batch := self._guarded(lambda: next(batches, None))) is not None:
                held = self._guarded(partial(self._held, batch))
                for number in range(batch.num_rows):
                    yield self._guarded(partial(self._row, held, number, first))
                first += batch.num_rows

    def _held(self, batch: Any) -> dict[str, Any]:
        """Returns the cells of each column."""
        return {column.name: self._cells(batch, path) for path, column in self._fields}

    def _row(self, held: dict[str, Any], number: int, first: int) -> Row:
        return {
            column.name: self._value(held[column.name], number, column, first)
            for column in self.columns
        }

    def _schema(self) -> Any:
        if self._parquet:
            return self._file().schema_arrow
        with self._arrow.memory_map(self.name) as mapped:
            return self._ipc(mapped).schema

    def _batches(self, names: list[str] | None) -> Generator[Any, None, None]:
        """Yields all rows; for Parquet only the columns `names`."""
        for batch in self._unchecked_batches(names):
            # pyarrow trusts the offsets and lengths that it reads; invalid ones would crash the
            # process.
            batch.validate(full=True)
            yield batch

    def _unchecked_batches(self, names: list[str] | None) -> Iterator[Any]:
        if self._parquet:
            yield from self._file().iter_batches(_BATCH, columns=names)
            return
        with self._arrow.memory_map(self.name) as mapped:
            reader = self._ipc(mapped)
            if hasattr(reader, "num_record_batches"):
                yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                yield from reader

    def _file(self) -> Any:
        return need("pyarrow.parquet", self.name).ParquetFile(self.name)

    def _ipc(self, mapped: Any) -> Any:
        ipc = need("pyarrow.ipc", self.name)
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        return ipc.open_file(mapped) if is_file else ipc.open_stream(mapped)

    def _scanned(
        self, fields: list[tuple[_Path, Column]]
    ) -> tuple[int, list[tuple[_Path, Column]]]:
        """Counts the rows and chooses for each column a type that holds its values."""
        # Not from Parquet's statistics: damaged statistics make pyarrow crash the process.
        nullable: set[str] = set()
        nested: set[str] = set()
        known = [(path, column) for path, column in fields if column.dtype != NESTED]
        length = self._file().metadata.num_rows if self._parquet else 0
        if known or not self._parquet:
            names = sorted({path[0] for path, _ in known})
            with closing(self._batches(names)) as batches:
                for batch in batches:
                    length += 0 if self._parquet else batch.num_rows
                    for path, column in known:
                        cells = self._cells(batch, path)
                        if cells.null_count:
                            nullable.add(column.name)
                        if column.shape and column.name not in nested and self._uneven(cells):
                            nested.add(column.name)
        return length, [
            (
                path,
                Column(column.name, NESTED)
                if column.name in nested
                else replace(column, nullable=column.name in nullable),
            )
            for path, column in fields
        ]

    def _uneven(self, cells: Any) -> bool:
        """Returns whether a list has nulls inside, or lists of different lengths at one depth."""
        compute = self._compute
        rows: np.ndarray[Any, Any] = np.arange(len(cells))
        outermost = True
        while self._is_list(cells.type):
            if not outermost:
                lengths = compute.list_value_length(cells).to_numpy(zero_copy_only=False)
                several = (np.diff(lengths) != 0) & (np.diff(rows) == 0)
                if cells.null_count or several.any():
                    return True
            rows = rows[compute.list_parent_indices(cells).to_numpy()]
            cells, outermost = compute.list_flatten(cells), False
        return bool(cells.null_count)

    def _flat(self, fields: Any, above: _Path) -> Iterator[tuple[_Path, Column]]:
        for field in fields:
            path, kind = (*above, field.name), self._storage_type(field.type)
            if self._arrow.types.is_struct(kind):
                yield from self._flat([kind.field(i) for i in range(len(kind))], path)
            else:
                yield path, self._column(".".join(path), kind)

    def _column(self, name: str, kind: Any) -> Column:
        types = self._arrow.types
        shape: tuple[int | None, ...] = ()
        inner = kind.value_type if types.is_dictionary(kind) else kind
        while self._is_list(inner):
            shape += (inner.list_size if types.is_fixed_size_list(inner) else None,)
            inner = inner.value_type
        if not shape and self._is(inner, *_STRINGS):
            return Column(name, "str")
        if not shape and self._is(inner, *_BINARIES):
            return Column(name, "bytes")
        if not shape and types.is_timestamp(inner):
            return Column(name, "int64")
        if types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner):
            return Column(name, np.dtype(inner.to_pandas_dtype()).name, shape)
        if self._is_plain(kind):
            return Column(name, NESTED)
        raise ConfigError(
            f"{self.name}: column {name!r} is {kind}, which a record file cannot store: "
            "remove the column"
        )

    def _is_plain(self, kind: Any) -> bool:
        """Returns whether nested values can hold this type."""
        types, kind = self._arrow.types, self._storage_type(kind)
        if self._is_list(kind) or types.is_dictionary(kind):
            return self._is_plain(kind.value_type)
        if types.is_struct(kind):
            return all(self._is_plain(kind.field(i).type) for i in range(len(kind)))
        if types.is_map(kind):
            return self._is_plain(kind.key_type) and self._is_plain(kind.item_type)
        plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        return bool(plain or self._is(kind, "null", *_STRINGS, *_BINARIES))

    def _is_list(self, kind: Any) -> bool:
        return self._is(kind, "list", "large_list", "fixed_size_list")

    def _is(self, kind: Any, *names: str) -> bool:
        """Returns whether `kind` is one of these types, as far as this pyarrow knows them."""
        tests = (getattr(self._arrow.types, f"is_{name}", None) for name in names)
        return any(test(kind) for test in tests if test is not None)

    def _storage_type(self, kind: Any) -> Any:
        return kind.storage_type if isinstance(kind, self._arrow.BaseExtensionType) else kind

    def _cells(self, batch: Any, path: _Path) -> Any:
        cells = self._stored(batch.column(batch.schema.get_field_index(path[0])))
        for name in path[1:]:
            cells = self._stored(self._compute.struct_field(cells, [name]))
        if self._is(cells.type, "dictionary"):
            cells = cells.dictionary_decode()
        return cells.view("int64") if self._is(cells.type, "timestamp") else cells

    def _stored(self, cells: Any) -> Any:
        return cells.storage if isinstance(cells.type, self._arrow.BaseExtensionType) else cells

    def _value(self, cells: Any, number: int, column: Column, first: int) -> Any:
        value = cells[number].as_py()
        if column.dtype == NESTED or (value is None and column.nullable):
            return value
        where = f"{self.name}, row {first + number}: column {column.name!r}"
        if value is None:
            raise Corrupted(f"{where} has become null: the file changed while it was read")
        if column.dtype in ("bytes", "str"):
            return value
        try:
            array = np.array(value, column.dtype)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}: {error}") from error
        if array.ndim != len(column.shape):  # for empty lists numpy finds only the outermost axis
            array = array.reshape([size or 0 for size in column.shape])
        return array

    def _guarded(self, call: Any) -> Any:
        try:
            return call()
        except (self._arrow.ArrowException, UnicodeDecodeError) as error:
            raise Corrupted(f"{self.name}: {error}") from error
        except OSError as error:
            raise reading(self.name, error) from error


def need(module: str, purpose: str, package: str = "") -> Any:
    """Imports an optional module; `package` is its distribution if that has another name.

    Raises:
        ConfigError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module.partition(".")[0]
        raise ConfigError(
            f"{purpose} needs {package}, which is not installed: pip install {package}"
        ) from error
