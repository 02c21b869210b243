"""Storage operations that the protocol code, which has no I/O, yields; names of a store's objects."""

import re
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Steps = Generator["Operation", Any, T]
"""Protocol step: a generator that yields operations, receives their results, and returns a T."""


class Create(msgspec.Struct, frozen=True):
    """Create an object; the result is False if its name exists."""

    name: str
    data: bytes


class Write(msgspec.Struct, frozen=True):
    """Write an object; no result."""

    name: str
    data: bytes


class Read(msgspec.Struct, frozen=True):
    """Read an object; the result is its bytes, or None if it does not exist."""

    name: str
    offset: int = 0
    length: int | None = None


class ListNames(msgspec.Struct, frozen=True):
    """List a folder; the result is the sorted names in it."""

    folder: str


class Delete(msgspec.Struct, frozen=True):
    """Delete an object if it exists; no result."""

    name: str


class Pause(msgspec.Struct, frozen=True):
    """Wait for some seconds; no result."""

    seconds: float


class Compute(msgspec.Struct, frozen=True):
    """Call a slow function that shares no state with the core; the result is the function's."""

    function: Callable[[], Any]


Operation = Create | Write | Read | ListNames | Delete | Pause | Compute

MANIFESTS, LOG, TABLES, PINS = "manifest", "log", "table", "pins"
_DIGITS = 20
_NUMBER = re.compile(rf"\d{{{_DIGITS}}}")
_TABLE = re.compile(r"(\d{10})-(\d{10})")


def manifest_name(number: int) -> str:
    return f"{MANIFESTS}/{number:0{_DIGITS}}"


def log_name(number: int) -> str:
    return f"{LOG}/{number:0{_DIGITS}}"


def table_name(epoch: int, number: int) -> str:
    """Returns the name of a table; an epoch never reuses a number."""
    return f"{epoch:010}-{number:010}"


def numbers(names: list[str]) -> list[int]:
    """Returns the numbers of a listed folder of manifests or log objects; skips other names."""
    return [int(name) for name in names if _NUMBER.fullmatch(name)]


def epoch_of(table: str) -> int | None:
    """Returns the epoch in the name of a table, or None for another name."""
    match = _TABLE.fullmatch(table)
    return int(match[1]) if match else None


def listed(folder: str) -> Steps[list[int]]:
    """Lists the numbers of a folder of manifests or log objects."""
    names: list[str] = yield ListNames(folder)
    return numbers(names)
