"""A torch Dataset, or anything with `__getitem__` and `__len__`, or that can be iterated: `module:name`."""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert.source import Column, Row, ahead, checked, column_of


class DatasetSource:
    """The items of an object of the user's: mappings as they are, tuples as columns item0, item1 ..., any
    other value as the column `data`. Arrays and tensors may differ in size, not in the number of axes.

    The module is imported, from the current folder too, which runs its code. A class or function is called
    without arguments.
    """

    def __init__(self, spec: str) -> None:
        """
        Raises:
            ConfigError: no such module or name, or it is no data set.
        """
        self.name = spec
        module, _, attribute = spec.partition(":")
        here = os.getcwd()
        if here not in sys.path:
            sys.path.insert(0, here)
        try:
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{spec}: {error}") from error
        self._items: Any = found() if callable(found) and not _is_data(found) else found
        if not _is_data(self._items):
            raise ConfigError(f"{spec} is {type(self._items).__name__}, not a data set")
        self._indexed = hasattr(self._items, "__getitem__") and hasattr(self._items, "__len__")
        self.length: int | None = len(self._items) if self._indexed else None
        self._once: list[Any] = []  # what was taken from an iterator that does not begin anew
        first = self._first()
        if first is None:
            raise ConfigError(f"{spec}: the data set is empty")
        self.columns: tuple[Column, ...] = tuple(
            column_of(name, value, spec, free=True) for name, value in first.items()
        )

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        for number, row in enumerate(self._raw(jobs)):
            yield checked(row, self.columns, f"{self.name}, item {number}")

    def _first(self) -> Row | None:
        if self._indexed:
            return _row(self._items[0]) if self.length else None
        begun = iter(self._items)
        taken = list(islice(begun, 1))
        if begun is self._items:
            self._once = taken
        return _row(taken[0]) if taken else None

    def _raw(self, jobs: int) -> Iterator[Row]:
        if self._indexed:
            return ahead(lambda index: _row(self._items[index]), self.length or 0, jobs)
        return map(_row, chain(self._once, self._items))


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
