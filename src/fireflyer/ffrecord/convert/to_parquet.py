"""Rows into a Parquet file, by pyarrow."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert.parquet import need
from fireflyer.ffrecord.convert.source import NESTED, Column, Row, Source
from fireflyer.ffrecord.convert.writing import row_bytes

_ROWS = 1 << 16
_BYTES = 64 << 20
"""Rows of a row group are written once there are so many, or so many bytes of them."""


def to_parquet(rows: Iterable[Row], source: Source, path: Path) -> int:
    """Write `rows`, which are those of `source`; return their number.

    Columns keep their types; lists of several sizes become lists, nested values lists and structs of the
    types that hold them all, which takes a reading of their own.

    Raises:
        ConfigError: pyarrow is not installed, or a column or value has no place in Parquet.
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
        raise ConfigError(f"{source.name}: no Parquet can be made of it: {error}") from error
    return count


def _typed(source: Source, arrow: Any) -> dict[str, Any]:
    """The types of the columns but those of nested values."""
    found = {}
    for column in source.columns:
        if column.dtype == NESTED:
            continue
        if column.dtype.startswith("complex"):
            raise ConfigError(
                f"{source.name}: column {column.name!r} is {column.text}, which Parquet has not: "
                "choose other columns by --columns"
            )
        texts = {"str": arrow.string(), "bytes": arrow.binary()}
        kind = texts.get(column.dtype) or arrow.from_numpy_dtype(np.dtype(column.dtype))
        for size in reversed(column.shape):
            kind = arrow.list_(kind) if size is None else arrow.list_(kind, size)
        found[column.name] = kind
    return found


def _nested(source: Source, arrow: Any) -> dict[str, Any]:
    """The types that hold all values of the columns of nested ones, by reading them."""
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
    """The rows in runs of `_ROWS` or about `_BYTES`."""
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
