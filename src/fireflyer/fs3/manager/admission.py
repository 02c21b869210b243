"""Which node processes a manager takes: those whose folder belongs to its file system. Pure."""

import secrets
from typing import Protocol

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.fs3.manager.routing import CLUSTER_KEY

REFUSED_KEPT = 64
"""Nodes of which it is remembered that they were refused."""


class Registration(msgspec.Struct, array_like=True):
    """A process of a node starts.

    Attributes:
        identity: of the node's folder; "" where it is not known.
        cluster: the number of the file system to which the folder belongs; "" if to none yet.
        holds: the folder has targets.
    """

    name: str
    address: str
    slots: int
    local: str = ""
    identity: str = ""
    cluster: str = ""
    holds: bool = False


class Rows(Protocol):
    """What is needed of a transaction."""

    def get(self, key: bytes) -> bytes | None: ...

    def set(self, key: bytes, value: bytes) -> None: ...


def cluster_of(rows: Rows) -> str:
    """The number of the file system, 128 random bits in hex, made where there is none."""
    known = rows.get(CLUSTER_KEY)
    if known is None:
        known = secrets.token_hex(16).encode()
        rows.set(CLUSTER_KEY, known)
    return known.decode()


class Refused:
    """The nodes that were not taken because they hold another file system's chunks, and why.

    Kept for people, until a process of that name is taken; a few of them, the newest.
    """

    def __init__(self) -> None:
        self._why: dict[str, str] = {}

    def note(self, name: str, why: str) -> None:
        self.taken(name)
        self._why[name] = why
        for oldest in list(self._why)[:-REFUSED_KEPT]:
            del self._why[oldest]

    def taken(self, name: str) -> None:
        self._why.pop(name, None)

    def lines(self) -> list[str]:
        return [f"node {name} is refused: {why}" for name, why in self._why.items()]


def stays(number: int, cluster: str, own: str) -> None:
    """A heartbeat came: whether its node may stay.

    Args:
        number: of the node, in its file system.
        cluster: the number of that file system; "": not said.
        own: that of the manager's.

    Raises:
        ConfigError: this is another file system's manager by now: the number is another node's here, or none.
    """
    if cluster not in ("", own):
        raise ConfigError(
            f"node number {number} is of file system {cluster[:8]}, and this manager serves {own[:8]}"
        )


def check(body: Registration, cluster: str, *, known: bool) -> None:
    """A process registers: whether it may.

    Args:
        known: a node of that name is in the records.

    Raises:
        ConfigError: the node holds chunks of another file system.
    """
    if body.cluster in ("", cluster) and (known or body.cluster or not body.holds):
        return
    whose = f"file system {body.cluster[:8]}" if body.cluster else "a file system without a number"
    raise ConfigError(
        f"the folder of node {body.name} belongs to {whose}, and this manager serves {cluster[:8]}: "
        "its metadata was lost or is another one's. Put the metadata store of that file system back; "
        "to give up what the node holds, remove the node's folder"
    )
