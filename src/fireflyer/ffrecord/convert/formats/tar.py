"""Tar archives and webdataset shards.

Files of one sample are adjacent and share their name up to the first dot (webdataset): `0001.jpg
0001.cls` is the row {key, jpg, cls}. The last part of the suffix determines the type. `cls` is an
integer in text, `txt` and `json` are text, `npy` is an array; any other suffix means bytes.
"""

import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.formats.archive import members
from fireflyer.ffrecord.convert.source import Column, Row, checked, chosen, is_unicode


class TarSource:
    """Source of one archive, plain or gzip."""

    length: int | None = None

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> None:
        """Reads the first sample for the columns; decodes only the files of `columns`.

        Raises:
            ConfigError: no file in the archive, or a member that is neither a file nor a folder.
            Corrupted, StorageError: as `rows`.
        """
        self.name = os.fspath(path)
        self.paths: tuple[str, ...] = (self.name,)
        first = next(self._samples(), None)
        if first is None:
            raise ConfigError(f"{self.name}: the archive holds no files")
        key, files = first
        self._wanted = None if columns is None else chosen(("key", *files), columns, self.name)
        row = self._row(key, files)
        self.columns = tuple(_column(name, row[name]) for name in row)

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        for number, (key, files) in enumerate(self._samples()):
            row = self._row(key, files)
            yield checked(row, self.columns, f"{self.name}, sample {number} ({key!r})")

    def _row(self, key: str, files: dict[str, tuple[str, bytes]]) -> Row:
        row: Row = {}
        if self._wanted is None or "key" in self._wanted:
            row["key"] = self._as_text(key)
        for field, (name, data) in files.items():
            if self._wanted is None or field in self._wanted:
                row[self._as_text(field)] = _decoded(data, field, f"{self.name}, file {name!r}")
        return row

    def _as_text(self, name: str) -> str:
        if not is_unicode(name):
            raise ConfigError(
                f"{self.name}: the name {name!r} is not UTF-8: select the columns without it with "
                "--columns, or rename the file"
            )
        return name

    def _samples(self) -> Iterator[tuple[str, dict[str, tuple[str, bytes]]]]:
        """Yields key and files of each sample: suffix -> (name, content)."""
        current: str | None = None
        files: dict[str, tuple[str, bytes]] = {}
        for name, data in members(self.name):
            folder, _, base = name.rpartition("/")
            stem, dot, suffix = base.partition(".")
            key = f"{folder}/{stem}" if folder else stem
            field = suffix if dot and suffix != "key" else "data"
            if current is not None and key != current:
                yield current, files
                files = {}
            if field in files:
                raise ConfigError(f"{self.name}: two files are named {name!r}: rename one of them")
            current = key
            files[field] = name, data
        if current is not None:
            yield current, files


def _column(name: str, value: Any) -> Column:
    if isinstance(value, np.ndarray):
        return Column(name, value.dtype.name, (None,) * value.ndim)
    return Column(name, "str" if isinstance(value, str) else "bytes")


def _decoded(data: bytes, field: str, where: str) -> Any:
    kind = field.rpartition(".")[2].lower()
    try:
        if kind in ("txt", "json"):
            return data.decode()
        if kind == "cls":
            return np.array(int(data.decode("ascii").strip()), np.int64)
        if kind == "npy":
            array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
            if array.dtype.kind not in "biufc":
                raise ValueError(f"unsupported dtype {array.dtype}")
            return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
    except (ValueError, OverflowError, EOFError, SyntaxError, TypeError, MemoryError) as error:
        raise Corrupted(f"{where} does not match its suffix: {error}") from error
    return data
