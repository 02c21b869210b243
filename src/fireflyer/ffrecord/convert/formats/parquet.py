"""Parquet and Arrow files, read with pyarrow if it is installed."""

import importlib
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.formats.arrow_types import ArrowTypes, Tensor
from fireflyer.ffrecord.convert.source import NESTED, Column, Row, chosen, reading

_BATCH = 1024


@dataclass(frozen=True, slots=True)
class _Field:
    """Column, and where the file stores it.

    Attributes:
        path: name of the column in the file, then names of nested struct fields.
        column: column of the rows.
        tensor: shape and axis order of tensors stored as innermost lists; None: no tensors.
    """

    path: tuple[str, ...]
    column: Column
    tensor: Tensor | None


class ParquetSource:
    """Parquet file, or Arrow IPC file or stream (`.arrow`, `.feather`).

    Integers, floats and bools keep their type. Strings become str, and binaries become bytes. Lists
    of numbers and fixed-shape tensors become arrays. Each struct field becomes a column, e.g.
    `image.bytes`. Dictionary-encoded values are decoded. Timestamps, dates, times and durations,
    also in lists, become integers in their own unit. A column with nulls is nullable. Lists of
    other types, lists with nulls inside and ragged nested lists become nested values (`msgpack`).
    Only the values, not the schema, show whether a column is nullable or ragged. A first pass
    therefore reads each column that the schema does not make nested.
    """

    length: int | None
    columns: tuple[Column, ...]

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> None:
        """Reads the schema and scans the columns: all, or only those named by `columns`.

        Raises:
            ConfigError: pyarrow is not installed, or a column has an unsupported type.
            Corrupted: the file is damaged, or has another format.
            StorageError: the file cannot be read.
        """
        self.name = os.fspath(path)
        self.paths: tuple[str, ...] = (self.name,)
        self._arrow = need("pyarrow", f"reading {self.name}")
        self._compute = need("pyarrow.compute", self.name)
        self._types = ArrowTypes(self._arrow)
        self._parquet = self.name.endswith((".parquet", ".pq"))
        found = self._guarded(lambda: list(self._flat(self._schema(), ())))
        if not found:
            raise ConfigError(f"{self.name}: it holds no columns")
        wanted = chosen((".".join(path) for path, _ in found), columns, self.name)
        for name in wanted:
            if wanted.count(name) > 1:
                raise ConfigError(
                    f"{self.name}: two columns would have the name {name!r}: rename one of them"
                )
        fields = [self._field(*one) for one in found if ".".join(one[0]) in wanted]
        self._tops = list(dict.fromkeys(field.path[0] for field in fields))
        self.length, self._fields = self._guarded(lambda: self._scanned(fields))
        self.columns = tuple(field.column for field in self._fields)

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        first = 0
        with closing(self._batches(self._tops)) as batches:
            while (batch := self._guarded(lambda: next(batches, None))) is not None:
                held = self._guarded(partial(self._held, batch))
                for number in range(batch.num_rows):
                    yield self._guarded(partial(self._row, held, number, first))
                first += batch.num_rows

    def _held(self, batch: Any) -> dict[str, Any]:
        """Returns the values of each column of a batch."""
        return {field.column.name: self._cells(batch, field.path) for field in self._fields}

    def _row(self, held: dict[str, Any], number: int, first: int) -> Row:
        return {
            field.column.name: self._value(held[field.column.name], number, field, first)
            for field in self._fields
        }

    def _schema(self) -> Any:
        if self._parquet:
            return self._file().schema_arrow
        with self._arrow.memory_map(self.name) as mapped:
            return self._ipc(mapped).schema

    def _batches(self, names: list[str]) -> Generator[Any, None, None]:
        """Yields all rows of the columns `names` in validated batches."""
        for batch in self._unchecked_batches(names):
            # pyarrow trusts the offsets and lengths that it reads; invalid ones would crash the
            # process.
            batch.validate(full=True)
            yield batch

    def _unchecked_batches(self, names: list[str]) -> Iterator[Any]:
        if self._parquet:
            yield from self._file().iter_batches(_BATCH, columns=names)
            return
        with self._arrow.memory_map(self.name) as mapped:
            reader = self._ipc(mapped)
            if hasattr(reader, "num_record_batches"):
                found = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                found = iter(reader)
            yield from (batch.select(names) for batch in found)

    def _file(self) -> Any:
        return need("pyarrow.parquet", self.name).ParquetFile(self.name)

    def _ipc(self, mapped: Any) -> Any:
        ipc = need("pyarrow.ipc", self.name)
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        return ipc.open_file(mapped) if is_file else ipc.open_stream(mapped)

    def _scanned(self, fields: list[_Field]) -> tuple[int, list[_Field]]:
        """Counts the rows and chooses for each column a type that holds its values."""
        # This reads the values, not Parquet's statistics: damaged statistics make pyarrow crash the
        # process.
        nullable: set[str] = set()
        nested: set[str] = set()
        known = [field for field in fields if field.column.dtype != NESTED]
        length = self._file().metadata.num_rows if self._parquet else 0
        if known or not self._parquet:
            tops = list(dict.fromkeys(field.path[0] for field in known))
            with closing(self._batches(tops)) as batches:
                for batch in batches:
                    length += 0 if self._parquet else batch.num_rows
                    for field in known:
                        name, cells = field.column.name, self._cells(batch, field.path)
                        if cells.null_count:
                            nullable.add(name)
                        if field.column.shape and name not in nested and self._uneven(cells):
                            nested.add(name)
        return length, [
            replace(
                field,
                column=Column(field.column.name, NESTED)
                if field.column.name in nested
                else replace(field.column, nullable=field.column.name in nullable),
            )
            for field in fields
        ]

    def _uneven(self, cells: Any) -> bool:
        """Returns whether a list has nulls inside, or lists of different lengths at one depth."""
        compute = self._compute
        rows: np.ndarray[Any, Any] = np.arange(len(cells))
        outermost = True
        while self._types.is_list(cells.type):
            if not outermost:
                lengths = compute.list_value_length(cells).to_numpy(zero_copy_only=False)
                several = (np.diff(lengths) != 0) & (np.diff(rows) == 0)
                if cells.null_count or several.any():
                    return True
            rows = rows[compute.list_parent_indices(cells).to_numpy()]
            cells, outermost = compute.list_flatten(cells), False
        return bool(cells.null_count)

    def _flat(self, fields: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yields path and type of each column."""
        for field in fields:
            path, kind = (*above, field.name), self._types.storage(field.type)
            if self._arrow.types.is_struct(kind):
                yield from self._flat([kind.field(i) for i in range(len(kind))], path)
            else:
                yield path, field.type

    def _field(self, path: tuple[str, ...], kind: Any) -> _Field:
        made = self._types.column(".".join(path), kind)
        if made is None:
            raise ConfigError(
                f"{self.name}: column {'.'.join(path)!r} is {kind}, which a record file cannot store: "
                "select the other columns with --columns"
            )
        return _Field(path, *made)

    def _cells(self, batch: Any, path: tuple[str, ...]) -> Any:
        """Returns the values of a column in their plain type."""
        cells = batch.column(batch.schema.get_field_index(path[0]))
        for name in path[1:]:
            cells = self._compute.struct_field(self._stored(cells), [name])
        cells = self._stored(cells)
        if self._arrow.types.is_dictionary(cells.type):
            cells = cells.dictionary_decode()
        plain = self._types.plain(cells.type)
        return cells if plain == cells.type else cells.cast(plain)

    def _stored(self, cells: Any) -> Any:
        return cells.storage if isinstance(cells.type, self._arrow.BaseExtensionType) else cells

    def _value(self, cells: Any, number: int, field: _Field, first: int) -> Any:
        value, column, tensor = cells[number].as_py(), field.column, field.tensor
        if value is None and (column.nullable or column.dtype == NESTED):
            return value
        if column.dtype == NESTED:
            return value if tensor is None else _arranged(value, tensor)
        where = f"{self.name}, row {first + number}: column {column.name!r}"
        if value is None:
            raise Corrupted(f"{where} has become null: the file changed while it was read")
        if column.dtype in ("bytes", "str"):
            return value
        try:
            array = np.array(value, column.dtype)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}: {error}") from error
        if array.ndim != len(column.shape) - (len(tensor.shape) - 1 if tensor else 0):
            # For empty lists numpy finds only the outermost axis.
            return array.reshape([size or 0 for size in column.shape])
        return np.ascontiguousarray(tensor.arranged(array)) if tensor is not None else array

    def _guarded(self, call: Any) -> Any:
        try:
            return call()
        except (self._arrow.ArrowException, UnicodeDecodeError) as error:
            raise Corrupted(f"{self.name}: {error}") from error
        except OSError as error:
            raise reading(self.name, error) from error


def _arranged(value: Any, tensor: Tensor) -> Any:
    """Replaces each flat list that stands for a tensor by nested lists in the tensor's shape.

    Lists around the tensors stay; a tensor may hold None.
    """
    if not value:  # None, or no tensors
        return value
    if any(isinstance(item, list) for item in value):
        return [_arranged(item, tensor) for item in value]
    return tensor.arranged(np.array(value, object)).tolist()


def need(module: str, purpose: str, package: str = "") -> Any:
    """Imports an optional module.

    Args:
        module: name of the module.
        purpose: use that needs the module, for the error.
        package: distribution to install; default: the module's first part.

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
