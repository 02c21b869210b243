"""Writer of rows to one record file, or to a folder of parts that appears atomically."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert.atomic_output import NewFolder, refuse_existing
from fireflyer.ffrecord.convert.source import Column, Row, describe
from fireflyer.ffrecord.paths import SUFFIX
from fireflyer.ffrecord.writer import FileWriter

Advance = Callable[[int, int], None]
"""Callback with the samples and bytes written so far."""


class RecordWriter(Protocol):
    """Writer of one record file of rows; a context manager that closes the file, or discards it
    after an error."""

    def write(self, row: Row) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...


class _Samples:
    """Writer of the only column of a file without a schema."""

    def __init__(self, writer: FileWriter, column: Column) -> None:
        self._writer, self._name = writer, column.name

    def write(self, row: Row) -> None:
        value = row[self._name]
        self._writer.write_one(value.encode() if isinstance(value, str) else value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.__exit__(*error)


class _Rows:
    """Writer of rows of a file with columns."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer

    def write(self, row: Row) -> None:
        self._writer.write_row(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.__exit__(*error)


@dataclass(frozen=True, slots=True)
class Form:
    """Storage form of rows.

    Attributes:
        version: format version; None: v1 for a single uncompressed column of bytes, otherwise v2.
        compression: "zstd" or None.
    """

    version: int | None = None
    compression: str | None = None

    def __post_init__(self) -> None:
        if self.compression not in (None, "zstd"):
            raise ConfigError(f"invalid --compression {self.compression!r}: expected zstd")
        if self.version == 1 and self.compression is not None:
            raise ConfigError("v1 files cannot hold compressed samples: use --format v2")


def open_writer(
    path: str | os.PathLike[str], columns: Sequence[Column], form: Form, n: int | None = None
) -> RecordWriter:
    """Returns a writer of rows with `columns`.

    A single column of bytes has no schema: its values are the samples. In v1 the same holds for a
    single column of text.

    Args:
        path: the record file.
        columns: columns of the rows.
        form: version and compression.
        n: number of rows; None: unknown, so a v1 writer writes the rows twice.

    Raises:
        ConfigError: v1 cannot hold the columns. Also raises what `FileWriter` raises.
    """
    only = columns[0].written if len(columns) == 1 else ""
    single = only == "bytes"
    version = form.version or (1 if single and form.compression is None else 2)
    if version == 1:
        if only not in ("bytes", "str"):
            raise ConfigError(
                f"v1 files hold one column of bytes or text, not {describe(columns)}: "
                "use --format v2, or select one with --columns"
            )
        return _Samples(FileWriter(path, n), columns[0])
    if single:
        writer = FileWriter(path, n, version=2, compression=form.compression)
        return _Samples(writer, columns[0])
    schema = {column.name: (column.written, column.shape) for column in columns}
    return _Rows(FileWriter(path, n, version=2, columns=schema, compression=form.compression))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Destination of rows.

    Attributes:
        out: a `.ffr` file, or a folder of PART_00000.ffr ... if `per_file` or `file_bytes` is
            given.
        total: number of expected rows; None if unknown.
        per_file: rows in a file; the last file may have fewer.
        file_bytes: size of a file's rows in bytes; the row that reaches it is the last of the file.
        force: replace existing data, as `NewFolder` describes.
        sources: paths that the rows are read from; no folder that holds such a path is replaced.
        form: version and compression of the files.
    """

    out: Path
    total: int | None = None
    per_file: int | None = None
    file_bytes: int | None = None
    force: bool = False
    sources: tuple[str, ...] = ()
    form: Form = field(default_factory=Form)

    @property
    def parts(self) -> bool:
        return self.per_file is not None or self.file_bytes is not None


@dataclass(frozen=True, slots=True)
class Written:
    """Result of writing; `bytes` is the total size of the files."""

    files: list[str]
    samples: int
    bytes: int


def write_rows(
    rows: Iterable[Row], columns: Sequence[Column], plan: Plan, advance: Advance
) -> Written:
    """Writes all rows atomically: after an error or an interrupt no row is left.

    Raises:
        ConfigError: the target exists, or its name is invalid.
        NoSpace, StorageError: the target cannot be written.
    """
    if not plan.parts:
        refuse_existing(plan.out, force=plan.force)
        with open_writer(plan.out, columns, plan.form, plan.total) as writer:
            count = _fill(writer, iter(rows), advance, 0, 0)[0]
        return Written([str(plan.out)], count, plan.out.stat().st_size)
    with NewFolder(plan.out, force=plan.force, sources=plan.sources) as folder:
        names, count = _write_parts(folder.path, iter(rows), columns, plan, advance)
    paths = [plan.out / name for name in names]
    return Written([str(path) for path in paths], count, sum(p.stat().st_size for p in paths))


def _write_parts(
    folder: Path, rows: Iterable[Row], columns: Sequence[Column], plan: Plan, advance: Advance
) -> tuple[list[str], int]:
    names: list[str] = []
    rows = iter(rows)
    count = held = 0
    row = next(rows, None)
    while row is not None or not names:
        names.append(f"PART_{len(names):05d}{SUFFIX}")
        n = None
        if plan.total is not None and plan.per_file is not None:
            n = min(plan.per_file, plan.total - count)
        in_file = file_bytes = 0
        with open_writer(folder / names[-1], columns, plan.form, n) as writer:
            while row is not None:
                writer.write(row)
                in_file += 1
                size = row_bytes(row)
                file_bytes, held = file_bytes + size, held + size
                advance(count + in_file, held)
                row = next(rows, None)
                if in_file == plan.per_file:
                    break
                if plan.file_bytes is not None and file_bytes >= plan.file_bytes:
                    break
        count += in_file
    return names, count


def _fill(
    writer: RecordWriter, rows: Iterable[Row], advance: Advance, count: int, held: int
) -> tuple[int, int]:
    for row in rows:
        writer.write(row)
        count += 1
        held += row_bytes(row)
        advance(count, held)
    return count, held


def row_bytes(row: Row) -> int:
    """Returns the bytes of a row's values; text counts by its characters."""
    return sum(map(_value_bytes, row.values()))


def _value_bytes(value: Any) -> int:
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    plain = value is None or isinstance(value, str | bytes | bytearray)
    return len(value or b"") if plain else len(msgspec.msgpack.encode(value))
