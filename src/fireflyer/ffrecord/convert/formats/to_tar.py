"""Export of rows to a tar in the form that `TarSource` reads."""

import hashlib
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fireflyer.errors import ConfigError, StorageError
from fireflyer.ffrecord.convert.formats.tar import TarSource
from fireflyer.ffrecord.convert.json_text import JsonEncoder
from fireflyer.ffrecord.convert.source import NESTED, Column, Row, Source

_TYPED = ("txt", "json", "cls", "npy")
"""Last parts of a suffix that determine a type."""


def to_tar(rows: Iterable[Row], source: Source, path: Path) -> int:
    """Writes a tar, then reads it back; returns the number of rows.

    A text column `key` names the samples' files; otherwise the numbers of the rows do.

    Raises:
        ConfigError: a tar cannot hold a column, a value or a key.
        StorageError: the tar does not give back the rows.
    """
    keyed = Column("key", "str") in source.columns and len(source.columns) > 1
    suffixes = _suffixes(source, keyed=keyed)
    written = _Digest()
    before: str | None = None
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for number, row in enumerate(rows):
            where = f"{source.name}, row {number}"
            key = row["key"] if keyed else f"{number:09d}"
            if keyed:
                _check_key(key, before, where)
            found: Row = {"key": key}
            for column, suffix in suffixes.items():
                data, found[suffix] = _content(column, row[column.name], suffix, where)
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size, info.mode = len(data), 0o644
                archive.addfile(info, io.BytesIO(data))
            written.add(found)
            before = key
    if written.rows:
        _check_read(path, source, written)
    return written.rows


def _check_read(path: Path, source: Source, written: "_Digest") -> None:
    again = _Digest()
    try:
        for row in TarSource(path).rows():
            again.add(row)
    except (ConfigError, StorageError) as error:
        message = str(error).replace(str(path), "the new tar")
        raise StorageError(f"{source.name}: the new tar cannot be read back: {message}") from error
    if again != written:
        raise StorageError(
            f"{source.name}: the new tar gives {again.rows} rows that differ from the {written.rows} "
            "rows that were written; it is deleted"
        )


class _Digest:
    """Digest of rows in their order: names, types, shapes and bytes."""

    def __init__(self) -> None:
        self.rows = 0
        self._hash = hashlib.blake2b()

    def add(self, row: Row) -> None:
        self.rows += 1
        for name, value in row.items():
            if isinstance(value, np.ndarray):
                kind, data = f"{value.dtype.name}{value.shape}", value.tobytes()
            else:
                kind = type(value).__name__
                data = value.encode() if isinstance(value, str) else value
            self._hash.update(repr((name, kind, len(data))).encode())
            self._hash.update(data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Digest) and self._hash.digest() == other._hash.digest()

    __hash__ = None  # type: ignore[assignment]


def _suffixes(source: Source, *, keyed: bool) -> dict[Column, str]:
    """Returns the suffix of each column's members.

    Raises:
        ConfigError: two columns would have the same suffix.
    """
    found: dict[Column, str] = {}
    for column in source.columns:
        if keyed and column.name == "key":
            continue
        suffix = _suffix(column)
        for other, its in found.items():
            if its == suffix:
                raise ConfigError(
                    f"{source.name}: the columns {other.name!r} and {column.name!r} would both be files "
                    f"'.{suffix}' of a tar: select one of them with --columns, or another format"
                )
        found[column] = suffix
    return found


def _suffix(column: Column) -> str:
    name, dtype = column.name, column.dtype
    if name in ("", "key") or "/" in name or "\0" in name:
        name = f"field_{name.replace('/', '_')}".replace("\0", "_")
    last = name.rpartition(".")[2].lower()
    if dtype == "bytes":
        return f"{name}.bin" if last in _TYPED else name
    if dtype == "str":
        return name if last in ("txt", "json") else f"{name}.txt"
    if dtype == NESTED:
        kind = "json"
    else:
        # A reader decodes `cls` as int64, which cannot hold every uint64.
        small = np.dtype(dtype).kind in "iu" and dtype != "uint64"
        kind = "cls" if small and not column.shape else "npy"
    return name if last == kind else f"{name}.{kind}"


def _check_key(key: str, before: str | None, where: str) -> None:
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


def _content(column: Column, value: Any, suffix: str, where: str) -> tuple[bytes, Any]:
    """Returns the bytes of one value, and the value that a reader gets from them."""
    if value is None:
        raise ConfigError(
            f"{where}: column {column.name!r} is None, which a tar cannot store: "
            "select other columns with --columns, or another format"
        )
    if column.dtype == "bytes":
        return bytes(value), bytes(value)
    if column.dtype == "str":
        return value.encode(), value
    if column.dtype == NESTED:
        data = JsonEncoder().value(column.name, value)
        return data, data.decode()
    array = np.asarray(value)
    if suffix.lower().endswith("cls"):
        return str(int(array)).encode(), np.array(int(array), np.int64)
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue(), array
