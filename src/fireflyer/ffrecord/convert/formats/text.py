"""Plain text, one sample per line, and JSON lines, one object per sample."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.json_text import JsonEncoder, decoded_object
from fireflyer.ffrecord.convert.source import Column, Row, as_array, reading

_EXACT = 1 << 53
"""Largest integer up to which float64 represents every integer exactly."""


class TextSource:
    """Lines without their terminators ("\\n" or "\\r\\n"), as rows {text}."""

    columns: tuple[Column, ...] = (Column("text", "str"),)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        self.paths: tuple[str, ...] = (self.name,)
        self.length: int | None = sum(1 for _ in _lines(self.name))

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        for number, line in enumerate(_lines(self.name), 1):
            yield {"text": _decoded(line, self.name, number)}


class JsonLinesSource:
    """Objects, one per line; skips empty lines. The file is read twice: first to find the columns,
    then for the rows.

    A key with only integers becomes int64; with numbers of which some are fractions, float64; with
    only true and false, bool; with only strings, str. A key with lists of numbers of equal depth
    becomes an array. A key with objects, null, mixed or missing values becomes a str column of JSON
    text. So does a key with both fractions and integers beyond 2**53, because float64 would round
    these integers.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the file for its columns.

        Raises:
            ConfigError: the file has no line.
            Corrupted: a line is not a JSON object.
            StorageError: the file cannot be read.
        """
        self.name = os.fspath(path)
        self.paths: tuple[str, ...] = (self.name,)
        kinds: dict[str, str] = {}
        seen: dict[str, int] = {}
        count = 0
        for _, row in self._objects():
            count += 1
            for key, value in row.items():
                kind = _kind(value)
                kinds[key] = _merged(kinds.get(key, kind), kind)
                seen[key] = seen.get(key, 0) + 1
        if not kinds:
            raise ConfigError(f"{self.name}: no line holds an object with keys")
        self.length: int | None = count
        self._kinds = {
            k: kind.replace("wide", "int64")
            if seen[k] == count and not kind.startswith("empty")
            else "json"
            for k, kind in kinds.items()
        }
        self.columns = tuple(_column(key, kind) for key, kind in self._kinds.items())

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        encoder = JsonEncoder()
        for number, found in self._objects():
            row: Row = {}
            for column in self.columns:
                kind = self._kinds.get(column.name, "json")
                value = found.get(column.name)
                if kind == "json":
                    row[column.name] = encoder.value(column.name, value).decode()
                elif kind == "str":
                    row[column.name] = value
                else:
                    row[column.name] = _number(value, column, f"{self.name}, line {number}")
            yield row

    def _objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(_lines(self.name), 1):
            if not line.strip():
                continue
            try:
                yield number, decoded_object(line)
            except ValueError as error:
                raise Corrupted(
                    f"{self.name}, line {number}: not a JSON object: {error}"
                ) from error


def _lines(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            for line in file:
                yield line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")
    except OSError as error:
        raise reading(path, error) from error


def _decoded(line: bytes, path: str, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise Corrupted(f"{path}, line {number}: not UTF-8 text: {error}") from error


def _kind(value: Any) -> str:
    """Returns bool, int64, float64, str or json; the first three with a "[]" for each list level.

    "wide" is an int64 that float64 may round. "empty[]" is a list without numbers, which fits lists
    of any numbers with at least as many levels.
    """
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if abs(value) <= _EXACT:
            return "int64"
        return "wide" if -(1 << 63) <= value < 1 << 63 else "json"
    if isinstance(value, float):
        return "float64"
    if isinstance(value, str):
        return "str"
    if isinstance(value, list):
        array = as_array(value)
        if array is not None and not array.size:
            return "empty" + "[]" * array.ndim
        if array is not None and array.dtype.name in ("bool", "int64", "float64"):
            kind = array.dtype.name
            # In a float64 array, the value `_EXACT` may be a larger integer that was rounded. It
            # therefore counts as beyond the bound.
            most = _EXACT - (kind == "float64")
            wide = kind != "bool" and bool((array > most).any() or (array < -most).any())
            if kind != "bool" and _holds(value, lambda item: isinstance(item, bool)):
                return "json"
            if kind == "float64" and wide and _holds(value, _is_wide):
                return "json"
            return ("wide" if kind == "int64" and wide else kind) + "[]" * array.ndim
    return "json"


def _is_wide(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > _EXACT


def _holds(value: list[Any], test: Callable[[Any], bool]) -> bool:
    return any(_holds(item, test) if isinstance(item, list) else test(item) for item in value)


def _merged(one: str, other: str) -> str:
    if one == other:
        return one
    for empty, full in ((one, other), (other, one)):
        if empty.startswith("empty") and 0 < empty.count("[]") <= full.count("[]"):
            return full
    levels = {kind.count("[]") for kind in (one, other)}
    plain = {kind.removesuffix("[]" * kind.count("[]")) for kind in (one, other)}
    if len(levels) == 1 and plain in ({"int64", "float64"}, {"int64", "wide"}):
        return ("wide" if "wide" in plain else "float64") + "[]" * levels.pop()
    return "json"


def _column(key: str, kind: str) -> Column:
    if kind in ("str", "json"):
        return Column(key, "str")
    return Column(key, kind.removesuffix("[]" * kind.count("[]")), (None,) * kind.count("[]"))


def _number(value: Any, column: Column, where: str) -> np.ndarray[Any, Any]:
    array = np.array(value, column.dtype)
    if not array.size and 0 < array.ndim < len(column.shape):
        array = array.reshape(array.shape + (0,) * (len(column.shape) - array.ndim))
    if array.ndim != len(column.shape):
        raise ConfigError(f"{where}: the file changed while it was read")
    return array
