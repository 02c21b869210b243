"""Source of numpy files; the first axis of each array counts the samples."""

import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.source import Column, Row, ahead, chosen, reading


class ArraySource:
    """Source of one `.npy` (column `data`), an `.npz`, or a folder of `.npy` files; an array is a
    column.

    `.npy` files are mapped; arrays of an `.npz` are held in memory. Object arrays (pickles) are
    rejected.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> None:
        """Opens the arrays that `columns` names, or all arrays if `columns` is None. A single
        `.npy` is always opened.

        Raises:
            ConfigError: arrays with different lengths or with a type that no column holds.
            Corrupted: the file is damaged, or not in numpy's format.
            StorageError: the file cannot be read.
        """
        self.name = os.fspath(path)
        self.paths: tuple[str, ...] = (self.name,)
        self._arrays = _load(Path(path), columns)
        lengths = {array.shape[0] for array in self._arrays.values() if array.ndim}
        scalars = [name for name, array in self._arrays.items() if not array.ndim]
        if scalars or len(lengths) != 1:
            shapes = ", ".join(f"{name}{list(a.shape)}" for name, a in self._arrays.items())
            raise ConfigError(
                f"{self.name}: the first axis of every array must be the samples, the shapes are {shapes}"
            )
        self.length: int | None = lengths.pop()
        self.columns = tuple(
            Column(name, array.dtype.newbyteorder("<").name, array.shape[1:])
            for name, array in self._arrays.items()
        )

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        return ahead(self._row, self.length or 0, 1)

    def _row(self, index: int) -> Row:
        return {
            name: np.ascontiguousarray(a[index], a.dtype.newbyteorder("<")).reshape(a.shape[1:])
            for name, a in self._arrays.items()
        }


def _load(path: Path, columns: Sequence[str] | None) -> dict[str, np.ndarray[Any, Any]]:
    try:
        if path.is_dir():
            files = {f.stem: f for f in sorted(path.glob("*.npy"))}
            names = chosen(files, columns, str(path))
            found = {name: np.load(files[name], "r", allow_pickle=False) for name in names}
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                found = {name: archive[name] for name in chosen(archive, columns, str(path))}
        else:
            found = {"data": np.load(path, "r", allow_pickle=False)}
    except (ValueError, EOFError, SyntaxError, zlib.error, zipfile.BadZipFile) as error:
        raise Corrupted(f"{path}: not an array of numbers that numpy can read: {error}") from error
    except (TypeError, OverflowError, MemoryError, NotImplementedError, KeyError) as error:
        raise Corrupted(f"{path}: invalid header: {error}") from error
    except OSError as error:
        raise reading(path, error) from error
    if not found:
        raise ConfigError(f"{path}: it holds no arrays")
    for name, array in found.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
            raise ConfigError(
                f"{path}: array {name!r} holds {getattr(array, 'dtype', 'no numbers')}, not numbers"
            )
    return found
