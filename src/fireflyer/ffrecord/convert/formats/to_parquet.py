"""Export of rows to a Parquet file, with pyarrow."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert.formats.parquet import need
from fireflyer.ffrecord.convert.record_writer import row_bytes
from fireflyer.ffrecord.convert.source import NESTED, Column, Row, Source

_ROWS = 1 << 16
_BYTES = 64 << 20
"""Limits of a row group: it is written when it has this many rows or bytes."""


def to_parquet(rows: Iterable[Row], source: Source, path: Path) -> int:
    """Writes `rows`, the rows of `source`; returns their number.

    Columns keep their types, and lists of several sizes become lists. Nested values become lists
    and structs of types that hold all of them, which takes an additional read.

    Raises:
        ConfigError: pyarrow is not installed, or Parquet cannot hold a column or value.
    """
    arrow = need("pyarrow", "writing Parquet")
    failures = (arrow.ArrowException, OverflowError)
    count = 0
    try:
        schema = arrow.schema(_nested(source, arrow) | _typed(source, arrow))
        schema = arrow.schema([schema.field(column.name) for column in source.columns])
        with need("pyarrow.parquet", "writing Parquet").ParquetWriter(path, schema) as writer:
            for group in _groups(rows):
                columns = [_array(group, column, schema, arrow) for column in source.columns]
                writer.write_batch(arrow.record_batch(columns, schema=schema))
                count += len(group)
    except failures as error:
        raise ConfigError(f"{source.name}: cannot convert it to Parquet: {error}") from error
    return count


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
        for size in reversed(column.shape):
            kind = arrow.list_(kind) if size is None else arrow.list_(kind, size)
        found[column.name] = kind
    return found


def _nested(source: Source, arrow: Any) -> dict[str, Any]:
    """Returns types that hold all values of the nested columns, by reading them."""
    names = [column.name for column in source.columns if column.dtype == NESTED]
    schema = arrow.schema({name: arrow.null() for name in names})
    for group in _groups(source.rows()) if names else ():
        kinds = {name: arrow.infer_type([_plain(row[name]) for row in group]) for name in names}
        schema = arrow.unify_schemas([schema, arrow.schema(kinds)], promote_options="permissive")
    return {name: schema.field(name).type for name in names}


def _array(group: list[Row], column: Column, schema: Any, arrow: Any) -> Any:
    values = [row[column.name] for row in group]
    if len(column.shape) != 1:
        values = [_plain(value) for value in values]
    return arrow.array(values, schema.field(column.name).type)


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
