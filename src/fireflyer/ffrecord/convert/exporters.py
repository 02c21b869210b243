"""Export of rows: to a tar, JSON lines, Parquet, or an `.npy` for each column."""

import io
import math
import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert.atomic_output import NewFolder, refuse_existing, write_atomically
from fireflyer.ffrecord.convert.formats.to_parquet import to_parquet
from fireflyer.ffrecord.convert.record_writer import Advance, Written, row_bytes
from fireflyer.ffrecord.convert.repack import closable
from fireflyer.ffrecord.convert.source import NESTED, Column, Row, Source
from fireflyer.ffrecord.output import BLOCK


def export(source: Source, kind: str, out: Path, force: bool, advance: Advance) -> Written:
    """Writes all rows to a tar, JSON lines, Parquet, or a folder with an `.npy` for each column.

    Raises:
        ConfigError: the format cannot hold a column or value, or the target exists.
        NoSpace, StorageError: the result cannot be written.
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
            count = _WRITERS[kind](counted, source, path)

        write_atomically(out, fill)
    return Written([str(out)], count, out.stat().st_size)


def _to_tar(rows: Iterable[Row], source: Source, path: Path) -> int:
    """Writes a tar; a text column `key` names the samples' files, otherwise their numbers do."""
    keyed = Column("key", "str") in source.columns and len(source.columns) > 1
    count, before = 0, ""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for row in rows:
            where = f"{source.name}, row {count}"
            key = row["key"] if keyed else f"{count:09d}"
            if keyed:
                _check_key(key, before, where)
            for name, value in row.items():
                if keyed and name == "key":
                    continue
                suffix, data = _tar_member(name, value, where)
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size, info.mode = len(data), 0o644
                archive.addfile(info, io.BytesIO(data))
            count, before = count + 1, key
    return count


def _check_key(key: str, before: str, where: str) -> None:
    """Checks the key of a row.

    Raises:
        ConfigError: readers of the tar would see another key, or merge the row with the previous
            row.
    """
    parts = key.split("/")
    if (
        key == before
        or "." in parts[-1]
        or any(part in ("", ".", "..") for part in parts)
        or "\0" in key
    ):
        why = "equals that of the previous row" if key == before else "cannot name files in a tar"
        raise ConfigError(
            f"{where}: the key {key[:100]!r} {why}: select the other columns with --columns to "
            "number the rows"
        )


def _tar_member(name: str, value: Any, where: str) -> tuple[str, bytes]:
    """Returns suffix and bytes of one value, in the form that `TarSource` reads."""
    if value is None:
        raise ConfigError(
            f"{where}: column {name!r} is None, which a tar cannot store: "
            "select other columns with --columns, or another format"
        )
    if name in ("", "key") or "/" in name or "\0" in name:
        name = f"field_{name.replace('/', '_')}".replace("\0", "_")
    last = name.rpartition(".")[2].lower()
    if isinstance(value, str):
        return (name if last in ("txt", "json") else f"{name}.txt"), value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return (f"{name}.bin" if last in ("txt", "json", "cls", "npy") else name), bytes(value)
    if not isinstance(value, np.ndarray | np.generic):
        return (name if last == "json" else f"{name}.json"), json_text(name, value)
    array = np.asarray(value)
    if not array.shape and array.dtype.kind in "iu":
        return (name if last == "cls" else f"{name}.cls"), str(int(array)).encode()
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return (name if last == "npy" else f"{name}.npy"), buffer.getvalue()


def _to_jsonl(rows: Iterable[Row], source: Source, path: Path) -> int:
    count = 0
    with open(path, "wb") as file:
        for row in rows:
            file.write(msgspec.json.encode(as_plain(row)) + b"\n")
            count += 1
    return count


_WRITERS = {"tar": _to_tar, "jsonl": _to_jsonl, "parquet": to_parquet}
EXPORTS = (*_WRITERS, "npy")


def as_plain(row: Row) -> dict[str, Any]:
    """Converts a row for JSON: bytes to base64, arrays to lists.

    Raises:
        ConfigError: a number that JSON cannot express.
    """
    return {name: _plain(name, value) for name, value in row.items()}


def json_text(name: str, value: Any) -> bytes:
    """Returns a value of column `name` as JSON; raises what `as_plain` does."""
    return msgspec.json.encode(_plain(name, value))


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(name, item) for key, item in value.items()}
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind in "biu" or (value.dtype.kind == "f" and np.isfinite(value).all()):
            return value.tolist()
    elif not isinstance(value, float) or math.isfinite(value):
        return value
    shown = value.ravel()[:3] if isinstance(value, np.ndarray | np.generic) else value
    raise ConfigError(f"column {name!r}: JSON cannot represent {shown}")


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
    return count


class _ArrayFile:
    """Growing `.npy`, written without a mapping, because a full disk would kill the process."""

    def __init__(self, path: Path, column: Column) -> None:
        self.column = column
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
        self._file.write(array.tobytes())
        self._rows += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file as file:
            if kind is None:
                file.seek(0)
                # numpy's header has room for any number of rows.
                if self._head() != self._place:
                    raise ConfigError(f"numpy's header of {self.column.name!r} changed its size")
                file.flush()
                os.fsync(file.fileno())

    def _head(self) -> int:
        """Writes the header for the rows so far; returns the end of the header."""
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
