"""Source whose rows are the items of a user's object, which `module:name` names.

The object is a torch Dataset, an iterable, or an indexable with a length.
"""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count, islice
from typing import Any

from fireflyer.errors import ConfigError, FireflyerError
from fireflyer.ffrecord.convert.source import Column, Row, ahead, checked, chosen, column_of


class DatasetSource:
    """Items of a user's object.

    Mappings are rows; tuples become columns item0, item1 ...; any other value becomes the column
    `data`. Arrays and tensors may differ in size, but not in the number of axes.

    The module may be in the current folder; the import runs the module's code. A class or function
    is called without arguments.
    """

    def __init__(self, spec: str, columns: Sequence[str] | None = None) -> None:
        """Imports the module and takes the columns from the first item; with `columns`, only those
        columns.

        Raises:
            ConfigError: the module or name does not exist, is not a data set, or its code fails.
        """
        self.name = spec
        self.paths: tuple[str, ...] = ()
        module, _, attribute = spec.partition(":")
        here = os.getcwd()
        if here not in sys.path:
            sys.path.insert(0, here)
        with self._guarded():
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
            self._items: Any = found() if callable(found) and not _is_data(found) else found
        if not _is_data(self._items):
            raise ConfigError(f"{spec} is {type(self._items).__name__}, not a data set")
        self._indexed = hasattr(self._items, "__getitem__") and hasattr(self._items, "__len__")
        self.length: int | None = None
        if self._indexed:
            with self._guarded():
                self.length = len(self._items)
        self._once: list[Any] = []  # items taken from an iterator that cannot restart
        first = self._first()
        if first is None:
            raise ConfigError(f"{spec}: the data set is empty")
        self.columns: tuple[Column, ...] = tuple(
            column_of(name, first[name], spec, free=True) for name in chosen(first, columns, spec)
        )
        self._wanted = None if columns is None else frozenset(columns)

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        for number, row in enumerate(self._raw(jobs)):
            if self._wanted is not None:
                row = {name: value for name, value in row.items() if name in self._wanted}
            yield checked(row, self.columns, f"{self.name}, item {number}")

    def _first(self) -> Row | None:
        if self._indexed:
            return self._at(0) if self.length else None
        with self._guarded():
            begun = iter(self._items)
        taken = list(islice(self._taken(begun), 1))
        if begun is self._items:
            self._once = taken
        return _row(taken[0]) if taken else None

    def _raw(self, jobs: int) -> Iterator[Row]:
        if self._indexed:
            return ahead(self._at, self.length or 0, jobs)
        with self._guarded():
            begun = iter(self._items)
        return map(_row, chain(self._once, self._taken(begun, len(self._once))))

    def _at(self, index: int) -> Row:
        with self._guarded(index):
            return _row(self._items[index])

    def _taken(self, items: Iterator[Any], number: int = 0) -> Iterator[Any]:
        """Yields the items of `items`, numbered from `number` for errors."""
        for index in count(number):
            with self._guarded(index):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    @contextmanager
    def _guarded(self, index: int | None = None) -> Iterator[None]:
        """Runs the user's code, which may raise any exception."""
        try:
            yield
        except Exception as error:
            where = self.name if index is None else f"{self.name}, item {index}"
            kind = "" if isinstance(error, FireflyerError | ImportError) else type(error).__name__
            message = ": ".join(part for part in (kind, str(error)) if part)
            raise ConfigError(f"{where}: {message}") from error


def _is_data(value: Any) -> bool:
    if isinstance(value, type):
        return False
    return hasattr(value, "__iter__") or (
        hasattr(value, "__getitem__") and hasattr(value, "__len__")
    )


def _row(item: Any) -> Row:
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if isinstance(item, tuple):
        return {f"item{number}": value for number, value in enumerate(item)}
    return {"data": item}
