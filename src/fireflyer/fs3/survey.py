"""What a file system holds and how it is: entries below a path, reading all of them, the state of chains."""

import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from fireflyer.errors import FileError, FireflyerError
from fireflyer.fs3.client import Client
from fireflyer.fs3.client.settings import find_secret
from fireflyer.fs3.find import Place
from fireflyer.fs3.manager.chains import Chain, Public
from fireflyer.fs3.manager.link import ManagerLink
from fireflyer.fs3.manager.routing import SLOTS, Node, Routing
from fireflyer.fs3.manager.service import Status
from fireflyer.fs3.roles import Role

AT_ONCE = 256
"""Names whose attributes are asked for in one call."""
PIECE = 4 << 20
THREADS = 6


class Found(NamedTuple):
    """A name and what `os.lstat` says of it."""

    path: str
    status: os.stat_result

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.status.st_mode)


def listing(client: Client, path: str) -> list[Found]:
    """What is in a directory, in order; the file itself where it is none."""
    status = client.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        return [Found(path, client.lstat(path))]
    names = client.listdir(path)
    found: list[Found] = []
    for at in range(0, len(names), AT_ONCE):
        paths = [os.path.join(path, name) for name in names[at : at + AT_ONCE]]
        for one, its in zip(paths, client.stat_many(paths), strict=True):
            if not isinstance(its, FileError):  # removed meanwhile
                found.append(Found(one, its))
    return found


def tree(client: Client, top: str) -> Iterator[Found]:
    """A path and all that is below it, from the top, in order. Symlinks are not followed."""
    waiting = [Found(top, client.lstat(top))]
    while waiting:
        one = waiting.pop()
        yield one
        if one.is_dir:
            try:
                waiting.extend(reversed(listing(client, one.path)))
            except FileNotFoundError:
                continue  # removed meanwhile


class Damage(msgspec.Struct):
    """A file that cannot be read, and why."""

    path: str
    reason: str


class Checked(msgspec.Struct):
    """What `check` found."""

    files: int
    bytes: int
    damages: list[Damage]


def check(client: Client, top: str, advance: Callable[[int], None]) -> Checked:
    """Reads every byte of the files at and below a path, from one replica each, and compares the CRCs.

    Args:
        advance: told of bytes that were read, by any thread.
    """

    def read(found: Found) -> Damage | None:
        try:
            with client.open(found.path, "r") as file:
                memory = bytearray(min(PIECE, file.size))
                for offset in range(0, file.size, PIECE):
                    advance(file.pread_into(memory, offset))
        except FileNotFoundError:
            return None  # removed meanwhile
        except (FireflyerError, OSError) as error:
            return Damage(found.path, str(error))
        return None

    files = [found for found in tree(client, top) if found.is_file]
    with ThreadPoolExecutor(THREADS, "fs3-check") as threads:
        damages = [damage for damage in threads.map(read, files) if damage]
    return Checked(len(files), sum(found.status.st_size for found in files), damages)


class NodeState(msgspec.Struct):
    """A storage node."""

    node: int
    name: str
    address: str
    alive: bool
    targets: int


class TargetState(msgspec.Struct):
    """A member of a chain."""

    target: int
    node: str
    state: str


class ChainState(msgspec.Struct):
    """A chain: it serves while one of its targets does, and is whole when all of them do."""

    chain: int
    version: int
    state: str
    targets: list[TargetState]


class Health(msgspec.Struct):
    """A file system."""

    manager: str
    epoch: int
    version: int
    nodes: list[NodeState]
    chains: list[ChainState]


def health(place: Place) -> Health:
    """How a file system is; raises WireError if no manager answers."""
    nodes: dict[int, Node] = {}
    chains: dict[int, Chain] = {}

    def told(part: Routing) -> None:
        nodes.update((node.id, node) for node in part.nodes)
        chains.update((chain.id, chain) for chain in part.chains)

    secret = find_secret(place.secret_file)
    link = ManagerLink(place.addresses, secret, Role.CLIENT, on_routing=told)
    try:
        link.refresh()
        status: Status = link.status()
    finally:
        link.close()
    alive = set(status.alive)
    return Health(
        *(status.primary, status.epoch, status.version),
        [
            NodeState(node.id, node.name, node.address, node.id in alive, node.slots)
            for _, node in sorted(nodes.items())
        ],
        [_chain_state(chain, nodes) for _, chain in sorted(chains.items())],
    )


def _chain_state(chain: Chain, nodes: dict[int, Node]) -> ChainState:
    serving = len(chain.targets(Public.SERVING))
    state = "whole" if serving == len(chain.members) else "degraded" if serving else "stopped"
    members = [
        TargetState(m.target, nodes[m.target // SLOTS].name, m.state.name.lower())
        for m in chain.members
    ]
    return ChainState(chain.id, chain.version, state, members)
