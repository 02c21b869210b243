"""Export of rows: to a tar, JSON lines, Parquet, or an `.npy` for each column.

An export is verified by reading it back before it gets its name.
"""

import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

import numpy as np

from fireflyer.errors import ConfigError, StorageError
from fireflyer.ffrecord.convert.atomic_output import NewFolder, refuse_existing, write_atomically
from fireflyer.ffrecord.convert.formats.to_parquet import to_parquet
from fireflyer.ffrecord.convert.formats.to_tar import to_tar
from fireflyer.ffrecord.convert.json_text import JsonEncoder, decoded_object
from fireflyer.ffrecord.convert.record_writer import Advance, Written, row_bytes
from fireflyer.ffrecord.convert.repack import closable
from fireflyer.ffrecord.convert.source import NESTED, Column, Row, Source
from fireflyer.ffrecord.output import BLOCK

EXPORTS = ("tar", "jsonl", "parquet", "npy")


def export(
    source: Source, kind: str, out: Path, force: bool, advance: Advance, nan: str = "NaN"
) -> Written:
    """Writes all rows to a tar, JSON lines, Parquet, or a folder with an `.npy` for each column.

    Args:
        source: the rows.
        kind: one of `EXPORTS`.
        out: path of the result.
        force: True to replace an existing result.
        advance: called with the number of rows and of bytes so far.
        nan: form of NaN and infinity in JSON lines, as for `JsonEncoder`.

    Raises:
        ConfigError: the format cannot hold a column or value, or the target exists.
        NoSpace, StorageError: the result cannot be written, or read back.
    """
    if kind != "npy":
        refuse_existing(out, force=force)
    with closing(closable(source.rows())) as rows:
        counted = _counted(rows, advance)
        if kind == "npy":
            own = {f"{column.name}.npy" for column in source.columns}
            with NewFolder(out, force=force, own=own.__contains__, sources=source.paths) as folder:
                count = _to_npy(counted, source, folder.path)
            files = sorted(out.glob("*.npy"))
            return Written([str(f) for f in files], count, sum(f.stat().st_size for f in files))
        count = 0

        def fill(path: Path) -> None:
            nonlocal count
            if kind == "jsonl":
                count = _to_jsonl(counted, source, path, nan)
            else:
                count = (to_tar if kind == "tar" else to_parquet)(counted, source, path)

        size = write_atomically(out, fill)
    return Written([str(out)], count, size)


def _to_jsonl(rows: Iterable[Row], source: Source, path: Path, nan: str) -> int:
    encoder, count, crc = JsonEncoder(nan), 0, 0
    with open(path, "wb") as file:
        for row in rows:
            line = encoder.row(row) + b"\n"
            file.write(line)
            count, crc = count + 1, zlib.crc32(line, crc)
    again = read = 0
    with open(path, "rb") as file:
        for read, line in enumerate(file, 1):
            again = zlib.crc32(line, again)
            try:
                decoded_object(line)
            except ValueError as error:
                raise _unread(source, f"line {read}: {error}") from error
    if (read, again) != (count, crc):
        raise _unread(source, f"its {read} lines differ from the {count} lines that were written")
    return count


def _unread(source: Source, reason: str) -> StorageError:
    return StorageError(f"{source.name}: the new file cannot be read back: {reason}; it is deleted")


def _to_npy(rows: Iterable[Row], source: Source, folder: Path) -> int:
    for column in source.columns:
        if column.dtype in ("bytes", "str", NESTED) or column.nullable or None in column.shape:
            raise ConfigError(
                f"{source.name}: column {column.name!r} is {column.text}; an array needs numbers of "
                "one shape: select columns with --columns, or another format"
            )
        if "/" in column.name or column.name.startswith("."):
            raise ConfigError(f"{source.name}: column {column.name!r} cannot name a file")
    count = 0
    with ExitStack() as files:
        arrays = [
            files.enter_context(_ArrayFile(folder / f"{column.name}.npy", column))
            for column in source.columns
        ]
        for row in rows:
            for array in arrays:
                array.add(row[array.column.name])
            count += 1
    for array in arrays:
        array.check_read(source)
    return count


class _ArrayFile:
    """Growing `.npy` file. It is written without mmap, because a full disk would kill a process
    that writes to a mapping."""

    def __init__(self, path: Path, column: Column) -> None:
        self.column, self._path, self._crc = column, path, 0
        self._shape = tuple(size for size in column.shape if size is not None)
        self._rows = 0
        self._file = open(path, "wb", buffering=BLOCK)  # noqa: SIM115

    def __enter__(self) -> Self:
        self._place = self._head()
        return self

    def add(self, value: Any) -> None:
        array = np.ascontiguousarray(value, self.column.dtype)
        if np.shape(value) != self._shape:
            raise ConfigError(
                f"row {self._rows}: column {self.column.name!r} has shape {list(np.shape(value))}, "
                f"not {list(self._shape)}"
            )
        data = array.tobytes()
        self._file.write(data)
        self._rows, self._crc = self._rows + 1, zlib.crc32(data, self._crc)

    def check_read(self, source: Source) -> None:
        """Reads the closed file back; raises StorageError if it does not hold the added values."""
        crc = 0
        try:
            found = np.load(self._path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise _unread(source, f"{self._path.name}: {error}") from error
        for row in found:
            crc = zlib.crc32(row.tobytes(), crc)
        if (found.shape, crc) != ((self._rows, *self._shape), self._crc):
            raise _unread(
                source, f"{self._path.name} holds other numbers, of shape {list(found.shape)}"
            )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file as file:
            if kind is None:
                file.seek(0)
                # numpy pads the header, so it has the same size for any number of rows.
                if self._head() != self._place:
                    raise ConfigError(f"numpy's header of {self.column.name!r} changed its size")
                file.flush()
                os.fsync(file.fileno())

    def _head(self) -> int:
        """Writes the header for the rows so far; returns the header's size in bytes."""
        dtype = np.dtype(self.column.dtype).newbyteorder("<")
        description = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (self._rows, *self._shape),
        }
        np.lib.format.write_array_header_2_0(self._file, description)
        return self._file.tell()


def _counted(rows: Iterable[Row], advance: Advance) -> Iterator[Row]:
    held = 0
    for count, row in enumerate(rows, 1):
        held += row_bytes(row)
        advance(count, held)
        yield row
