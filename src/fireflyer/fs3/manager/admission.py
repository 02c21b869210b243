"""Which node processes a manager takes: those whose folder belongs to its file system. Pure."""

import secrets
from typing import Protocol

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.fs3.manager.routing import CLUSTER_KEY


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


def check(body: Registration, cluster: str, *, known: bool) -> None:
    """
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
