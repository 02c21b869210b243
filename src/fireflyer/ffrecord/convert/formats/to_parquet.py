"""Export of rows to a Parquet file, with pyarrow."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fireflyer.errors import ConfigError, StorageError
from fireflyer.ffrecord.convert.formats.parquet import need
from fireflyer.ffrecord.convert.record_writer import row_bytes
from fireflyer.ffrecord.convert.source import NESTED, Column, Row, Source

_ROWS = 1 << 16
_BYTES = 64 << 20
"""Limits of a row group, which is written when it has this many rows or bytes."""


def to_parquet(rows: Iterable[Row], source: Source, path: Path) -> int:
    """Writes `rows`, the rows of `source`, and reads them back; returns their number.

    Columns keep their types. Each axis of an array becomes a list, of fixed size if the column has
    a fixed size. Nested values become lists and structs. If there are nested values, all rows are
    read first, to find types that hold these values.

    Raises:
        ConfigError: pyarrow is not installed, or Parquet cannot hold a column or value.
        StorageError: the file does not give back the rows.
    """
    arrow = need("pyarrow", "writing Parquet")
    parquet = need("pyarrow.parquet", "writing Parquet")
    count = 0
    written = []
    schema = _schema(source, arrow)
    with parquet.ParquetWriter(path, schema) as writer:
        for group in _groups(rows):
            columns = [_array(group, column, schema, arrow, source) for column in source.columns]
            written.append([_digest(column, arrow) for column in columns])
            writer.write_batch(
                arrow.record_batch(columns, schema=schema), row_group_size=len(group)
            )
            count += len(group)
    try:
        with parquet.ParquetFile(path) as file:
            groups = map(file.read_row_group, range(file.num_row_groups))
            found = [
                [_digest(column.combine_chunks(), arrow) for column in group.columns]
                for group in groups
            ]
            same = found == written and file.schema_arrow.equals(schema)
    except (arrow.ArrowException, OSError) as error:
        raise _unread(source, f": {error}") from error
    if not same:
        raise _unread(source, "")
    return count


def _unread(source: Source, reason: str) -> StorageError:
    return StorageError(
        f"{source.name}: the new Parquet file does not give back the rows{reason}; it is deleted"
    )


def _schema(source: Source, arrow: Any) -> Any:
    kinds = _nested(source, arrow) | _typed(source, arrow)
    return arrow.schema([(column.name, kinds[column.name]) for column in source.columns])


def _digest(cells: Any, arrow: Any) -> bytes:
    """Returns a digest of an array's values. The digest does not depend on the layout of the
    buffers."""
    kind, types, compute = cells.type, arrow.types, need("pyarrow.compute", "writing Parquet")
    made = hashlib.blake2b(len(cells).to_bytes(8, "little"))
    made.update(np.packbits(cells.is_valid().to_numpy(zero_copy_only=False)).tobytes())
    if types.is_struct(kind):
        for number in range(kind.num_fields):
            made.update(_digest(compute.struct_field(cells, [number]), arrow))
    elif types.is_list(kind) or types.is_fixed_size_list(kind):
        sizes = compute.list_value_length(cells.drop_null())
        made.update(sizes.to_numpy(zero_copy_only=False).tobytes())
        made.update(_digest(cells.flatten(), arrow))
    elif types.is_string(kind) or types.is_binary(kind):
        there = cells.drop_null()
        made.update(compute.binary_length(there).to_numpy(zero_copy_only=False).tobytes())
        made.update(b"".join(there.cast(arrow.binary()).to_pylist()))
    elif not types.is_null(kind):
        made.update(cells.drop_null().to_numpy(zero_copy_only=False).tobytes())
    return made.digest()


def _typed(source: Source, arrow: Any) -> dict[str, Any]:
    """Returns the types of the columns without nested values."""
    found = {}
    for column in source.columns:
        if column.dtype == NESTED:
            continue
        if column.dtype.startswith("complex"):
            raise ConfigError(
                f"{source.name}: column {column.name!r} is {column.text}, which Parquet does not support: "
                "select other columns with --columns"
            )
        texts = {"str": arrow.string(), "bytes": arrow.binary()}
        kind = texts.get(column.dtype) or arrow.from_numpy_dtype(np.dtype(column.dtype))
        for size in reversed(column.shape):  # Parquet cannot read lists of a fixed size of 0
            kind = arrow.list_(kind, size) if size else arrow.list_(kind)
        found[column.name] = kind
    return found


def _nested(source: Source, arrow: Any) -> dict[str, Any]:
    """Returns types that hold all values of the nested columns, by reading them."""
    names = [column.name for column in source.columns if column.dtype == NESTED]
    found = {name: arrow.null() for name in names}
    for group in _groups(source.rows()) if names else ():
        for name in names:
            with _naming(source, name, arrow):
                kind = arrow.infer_type([_plain(row[name]) for row in group])
                both = [arrow.schema({name: each}) for each in (found[name], kind)]
                joined = arrow.unify_schemas(both, promote_options="permissive")
                found[name] = joined.field(name).type
    return found


def _array(group: list[Row], column: Column, schema: Any, arrow: Any, source: Source) -> Any:
    values = [row[column.name] for row in group]
    if len(column.shape) != 1:
        values = [_plain(value) for value in values]
    with _naming(source, column.name, arrow):
        made = arrow.array(values, schema.field(column.name).type)
    if column.dtype == NESTED:
        for value, stored in zip(values, made.to_pylist(), strict=True):
            if not _same(value, stored):
                raise ConfigError(
                    f"{source.name}: column {column.name!r} holds {str(value)[:60]}, which Parquet "
                    f"would store as {str(stored)[:60]}: select other columns with --columns"
                )
    return made


@contextmanager
def _naming(source: Source, name: str, arrow: Any) -> Iterator[None]:
    try:
        yield
    except (arrow.ArrowException, OverflowError) as error:
        raise ConfigError(
            f"{source.name}: column {name!r} has no type in Parquet: {error}; select other columns "
            "with --columns"
        ) from error


def _same(value: Any, stored: Any) -> bool:
    """Returns whether Parquet stores a nested value unchanged, apart from missing keys, which
    become None.
    """
    if isinstance(value, dict) and isinstance(stored, dict):
        return all(_same(value.get(key), its) for key, its in stored.items())
    if isinstance(value, list | tuple) and isinstance(stored, list):
        return len(value) == len(stored) and all(map(_same, value, stored))
    return bool(value == stored or (value != value and stored != stored))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yields the rows in runs of `_ROWS` or about `_BYTES`."""
    group: list[Row] = []
    held = 0
    for row in rows:
        group.append(row)
        held += row_bytes(row)
        if len(group) == _ROWS or held >= _BYTES:
            yield group
            group, held = [], 0
    if group:
        yield group
