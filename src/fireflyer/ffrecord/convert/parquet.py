"""Parquet and Arrow files, by pyarrow where it is installed."""

import importlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.source import Column, Row, reading

_BATCH = 1024


class ParquetSource:
    """A Parquet file, or an Arrow IPC file or stream (`.arrow`, `.feather`).

    Integers, floats and bools keep their type, strings and binaries become str and bytes, lists of numbers
    arrays; a struct becomes a column for each of its fields, `image.bytes`. Of dictionaries the values
    are taken, of timestamps the int64 that counts their own unit.
    """

    length: int | None
    columns: tuple[Column, ...]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """
        Raises:
            ConfigError: pyarrow is not installed, or a column of a type that has no place here.
            Corrupted: damaged, or another format.
            StorageError: it cannot be read.
        """
        self.name = os.fspath(path)
        self.paths: tuple[str, ...] = (self.name,)
        self._arrow = need("pyarrow", f"reading {self.name}")
        self._parquet = self.name.endswith((".parquet", ".pq"))
        if self._parquet:
            file = self._guarded(lambda: need("pyarrow.parquet", self.name).ParquetFile(self.name))
            schema, self.length = file.schema_arrow, int(file.metadata.num_rows)
        else:
            schema, self.length = self._guarded(self._ipc_shape)
        self._fields = list(self._flat(schema, ()))
        if not self._fields:
            raise ConfigError(f"{self.name}: no column in it")
        self.columns = tuple(column for _, column in self._fields)
        names = [column.name for column in self.columns]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"{self.name}: two columns would be called {name!r}: rename one of them"
                )

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        first = 0
        batches = self._batches()
        while (batch := self._guarded(lambda: next(batches, None))) is not None:
            held = {column.name: self._cells(batch, path) for path, column in self._fields}
            for number in range(batch.num_rows):
                yield {
                    column.name: self._value(held[column.name], number, column, first)
                    for column in self.columns
                }
            first += batch.num_rows

    def _batches(self) -> Iterator[Any]:
        if self._parquet:
            file = need("pyarrow.parquet", self.name).ParquetFile(self.name)
            yield from file.iter_batches(_BATCH)
            return
        with self._arrow.memory_map(self.name) as mapped:
            yield from self._ipc(mapped)

    def _ipc(self, mapped: Any) -> Iterator[Any]:
        ipc = need("pyarrow.ipc", self.name)
        if mapped.read(6) == b"ARROW1":
            mapped.seek(0)
            reader = ipc.open_file(mapped)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            mapped.seek(0)
            yield from ipc.open_stream(mapped)

    def _ipc_shape(self) -> tuple[Any, int]:
        rows, schema = 0, None
        for batch in self._batches():
            schema = schema or batch.schema
            rows += batch.num_rows
        if schema is None:
            raise ConfigError(f"{self.name}: no row in it")
        return schema, rows

    def _flat(
        self, fields: Any, above: tuple[str, ...]
    ) -> Iterator[tuple[tuple[str, ...], Column]]:
        types = self._arrow.types
        for field in fields:
            path = (*above, field.name)
            if types.is_struct(field.type):
                yield from self._flat([field.type.field(i) for i in range(len(field.type))], path)
            else:
                yield path, self._column(".".join(path), field.type)

    def _column(self, name: str, kind: Any) -> Column:
        types = self._arrow.types
        shape: tuple[int | None, ...] = ()
        inner = kind
        if types.is_dictionary(inner):
            inner = inner.value_type
        while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
            shape += (inner.list_size if types.is_fixed_size_list(inner) else None,)
            inner = inner.value_type
        if not shape and self._is(inner, "string", "large_string", "string_view"):
            return Column(name, "str")
        if not shape and self._is(
            inner, "binary", "large_binary", "fixed_size_binary", "binary_view"
        ):
            return Column(name, "bytes")
        if not shape and types.is_timestamp(inner):
            return Column(name, "int64")
        if types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner):
            return Column(name, np.dtype(inner.to_pandas_dtype()).name, shape)
        raise ConfigError(
            f"{self.name}: column {name!r} is {kind}, which has no place in a record file: "
            "leave it out of the file"
        )

    def _is(self, kind: Any, *names: str) -> bool:
        """Whether it is one of these types, as far as this pyarrow knows them."""
        tests = (getattr(self._arrow.types, f"is_{name}", None) for name in names)
        return any(test(kind) for test in tests if test is not None)

    def _cells(self, batch: Any, path: tuple[str, ...]) -> Any:
        cells = batch.column(batch.schema.get_field_index(path[0]))
        for name in path[1:]:
            cells = cells.field(name)
        if self._is(cells.type, "dictionary"):
            cells = cells.dictionary_decode()
        return cells.view("int64") if self._is(cells.type, "timestamp") else cells

    def _value(self, cells: Any, number: int, column: Column, first: int) -> Any:
        value = cells[number].as_py()
        if value is None:
            raise ConfigError(
                f"{self.name}, row {first + number}: column {column.name!r} is null: "
                "fill it, or leave the column out of the file"
            )
        if column.dtype in ("bytes", "str"):
            return value
        try:
            array = np.array(value, column.dtype)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.name}, row {first + number}: column {column.name!r}: {error}"
            ) from error
        return array.reshape([size or 0 for size in column.shape]) if not array.size else array

    def _guarded(self, call: Any) -> Any:
        try:
            return call()
        except self._arrow.ArrowException as error:
            raise Corrupted(f"{self.name}: {error}") from error
        except OSError as error:
            raise reading(self.name, error) from error


def need(module: str, purpose: str) -> Any:
    """An optional module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"{purpose} needs {package}, which is not installed: pip install {package}"
        ) from error
