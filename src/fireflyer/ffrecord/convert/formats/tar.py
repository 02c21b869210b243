"""Tar archives and webdataset shards.

Files of one sample are adjacent and share their name up to the first dot (webdataset): `0001.jpg
0001.cls` is the row {key, jpg, cls}. The last part of the suffix determines the type: `cls` an
integer in text, `txt` and `json` text, `npy` an array, otherwise bytes.
"""

import io
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.formats.archive import members
from fireflyer.ffrecord.convert.source import Column, Row, checked


class TarSource:
    """One archive, plain or gzip."""

    length: int | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the first sample for the columns.

        Raises:
            ConfigError: no file in the archive, or a member that is neither a file nor a folder.
            Corrupted, StorageError: as `rows`.
        """
        self.name = os.fspath(path)
        self.paths: tuple[str, ...] = (self.name,)
        first = next(self._samples(), None)
        if first is None:
            raise ConfigError(f"{self.name}: the archive holds no files")
        self.columns = tuple(_column(name, first[name]) for name in first)

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        for number, sample in enumerate(self._samples()):
            where = f"{self.name}, sample {number} ({sample['key']!r})"
            yield checked(sample, self.columns, where)

    def _samples(self) -> Iterator[Row]:
        row: Row = {}
        for name, data in members(self.name):
            folder, _, base = name.rpartition("/")
            stem, dot, suffix = base.partition(".")
            key = f"{folder}/{stem}" if folder else stem
            field = suffix if dot and suffix != "key" else "data"
            if row and (key != row["key"]):
                yield row
                row = {}
            if field in row:
                raise ConfigError(f"{self.name}: two files are named {name!r}: rename one of them")
            row = row or {"key": key}
            row[field] = _decoded(data, field, f"{self.name}, file {name!r}")
        if row:
            yield row


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
