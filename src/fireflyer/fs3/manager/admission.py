"""Admission of node processes: their folder must belong to the manager's file system."""

import secrets
from typing import Protocol

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.fs3.manager.routing import CLUSTER_KEY

REFUSED_KEPT = 64
"""Maximum number of refused nodes in the status."""


class Registration(msgspec.Struct, array_like=True):
    """Request of a starting node process to join the cluster.

    Attributes:
        name: name of the node.
        address: address of the node's data service.
        slots: number of the node's targets.
        local: see `Node`.
        identity: identity of the node's folder; "": unknown.
        cluster: number of the file system to which the folder belongs; "": none yet.
        holds: True if the folder has targets.
    """

    name: str
    address: str
    slots: int
    local: str = ""
    identity: str = ""
    cluster: str = ""
    holds: bool = False


class Rows(Protocol):
    """Methods of a transaction that this module needs."""

    def get(self, key: bytes) -> bytes | None: ...

    def set(self, key: bytes, value: bytes) -> None: ...


def cluster_of(rows: Rows) -> str:
    """Returns the number of the file system, 128 random bits in hex; if the file system has no
    number, draws one."""
    known = rows.get(CLUSTER_KEY)
    if known is None:
        known = secrets.token_hex(16).encode()
        rows.set(CLUSTER_KEY, known)
    return known.decode()


class Refused:
    """Nodes refused because they hold another file system's chunks, and the reasons.

    Entries are for display. An entry is kept until a process of its name is admitted, or until
    there are REFUSED_KEPT newer entries.
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


def check_heartbeat(number: int, cluster: str, own: str) -> None:
    """Checks that a node that sent a heartbeat belongs to this file system.

    Args:
        number: number of the node, as its file system assigned it.
        cluster: number of the node's file system; "": not sent.
        own: number of the manager's file system.

    Raises:
        ConfigError: this manager serves another file system, in which the node's number means
            another node or none.
    """
    if cluster not in ("", own):
        raise ConfigError(
            f"node number {number} belongs to file system {cluster[:8]}, and this manager serves {own[:8]}"
        )


def check(body: Registration, cluster: str, *, known: bool) -> None:
    """Checks that a process may register.

    Args:
        known: True if the records have a node of that name.

    Raises:
        ConfigError: the node holds chunks of another file system.
    """
    if body.cluster in ("", cluster) and (known or body.cluster or not body.holds):
        return
    whose = f"file system {body.cluster[:8]}" if body.cluster else "a file system without a number"
    raise ConfigError(
        f"the folder of node {body.name} belongs to {whose}, and this manager serves {cluster[:8]}: "
        "the metadata store was lost or belongs to another file system. Restore the metadata store of "
        "that file system; to discard the data of the node, remove the node's folder"
    )
