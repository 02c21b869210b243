"""Devices of a node, and types of GPUs: which devices a task gets, and which nodes it may use. Pure.

A set of devices is an `int` with one bit per index. Tasks get aligned blocks, as from a buddy
allocator, so that later requests find adjacent devices: devices 2k and 2k + 1 usually share a PCIe
switch, and the devices of each half of a node share a socket.
"""

import re
from functools import lru_cache

from fireflyer.errors import ConfigError

MOST = 1024
"""Maximum number of devices of a node."""

_TYPE = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?", re.ASCII)


def parse_request(text: str, option: str = "--gpus") -> tuple[int, str]:
    """Returns the number and the type in a request like "2" or "a100:2"; the type may be empty.

    Raises:
        ConfigError: the text is not such a request; the message names the option.
    """
    kind, colon, number = text.rpartition(":")
    kind = kind.lower()
    if not (number.isascii() and number.isdecimal() and len(number) <= 4 and int(number) <= MOST):
        raise ConfigError(f"invalid {option} {text!r}: expected e.g. 2 or a100:2")
    if colon and not is_type(kind):
        raise ConfigError(f"invalid {option} {text!r}: expected a type like a100 before the colon")
    if colon and not int(number):
        raise ConfigError(f"invalid {option} {text!r}: expected at least one GPU of this type")
    return int(number), kind


def is_type(text: str) -> bool:
    """Returns whether a text can be the type of a GPU: lower-case letters and digits, with `._-`
    inside."""
    return _TYPE.fullmatch(text) is not None


def matches(asked: str, kind: str) -> bool:
    """Returns whether a node with GPUs of type `kind` serves a request for `asked`; an empty request
    accepts every type."""
    return not asked or asked == kind or kind.startswith(asked + "-")


def in_words(gpus: int, kind: str) -> str:
    """Returns a request as text, for example "1 GPU" or "2 a100 GPUs"."""
    noun = "GPU" if gpus == 1 else "GPUs"
    return f"{gpus} {kind} {noun}" if kind else f"{gpus} {noun}"


def mask(devices: tuple[int, ...]) -> int:
    """Returns the set of these indexes."""
    found = 0
    for device in devices:
        found |= 1 << device
    return found


def members(devices: int) -> tuple[int, ...]:
    """Returns the indexes in a set, in order."""
    return tuple(index for index in range(devices.bit_length()) if devices >> index & 1)


@lru_cache(maxsize=4096)
def pick(free: int, count: int) -> tuple[int, ...]:
    """Chooses `count` of the free devices from the smallest aligned block that has enough. Among
    blocks of equal size, the free devices of the enclosing blocks are compared, from the complete
    node down: the smaller number wins.

    Raises:
        ValueError: fewer devices are free.
    """
    if free.bit_count() < count:
        raise ValueError(f"{free.bit_count()} devices are free, not {count}")
    if not count:
        return ()
    size = 1 << (free.bit_length() - 1).bit_length()
    return members(_descend(free, size, count)[2])[:count]


def _descend(inside: int, size: int, count: int) -> tuple[int, tuple[int, ...], int]:
    """Returns the size of the chosen block, the numbers of free devices on the way down to the
    block, and its free devices. REQUIRES: `inside`, in an aligned block of `size`, has at least
    `count` devices."""
    number = inside.bit_count()
    half = size >> 1
    if half:
        first = ((inside & -inside).bit_length() - 1) // size * size
        low = inside & ((1 << (first + half)) - 1)
        parts = [part for part in (low, inside ^ low) if part.bit_count() >= count]
        if parts:
            found = [_descend(part, half, count) for part in parts]
            block, path, best = min(found, key=lambda each: each[:2])
            return block, (number, *path), best
    return size, (number,), inside


class DeviceTable:
    """Devices and GPU type of each node, and the devices that jobs hold. A node is given by its place:
    its index in the cluster."""

    __slots__ = ("_busy", "_counts", "_kinds", "_typed")

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._kinds: list[str] = []
        self._busy: list[int] = []
        self._typed: dict[str, int] = {}

    def put(self, place: int, count: int, kind: str) -> None:
        """Sets the devices of a node. A node that is new gets the place after the last one. Held
        devices stay held."""
        if place == len(self._counts):
            self._counts.append(0)
            self._kinds.append("")
            self._busy.append(0)
            self._typed.clear()
        if self._kinds[place] != kind:
            self._typed.clear()
        self._counts[place], self._kinds[place] = count, kind

    def typed(self, asked: str) -> int:
        """Returns the nodes whose GPUs match this type (`matches`), as a set of places."""
        found = self._typed.get(asked)
        if found is None:
            found = 0
            for place, kind in enumerate(self._kinds):
                if matches(asked, kind):
                    found |= 1 << place
            self._typed[asked] = found
        return found

    def free(self, place: int) -> int:
        """Returns the set of the node's devices that no job holds."""
        return ((1 << self._counts[place]) - 1) & ~self._busy[place]

    def take(self, place: int, devices: tuple[int, ...]) -> None:
        """Gives devices of a node to a job."""
        self._busy[place] |= mask(devices)

    def give(self, place: int, devices: tuple[int, ...]) -> None:
        """Reverses `take`."""
        self._busy[place] &= ~mask(devices)
