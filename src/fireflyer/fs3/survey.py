"""Contents and health of a file system: tree walks, checks of files, states of chains."""

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from fireflyer.errors import ConfigError, DeadlineExceeded, FileError, FireflyerError
from fireflyer.fs3.client import Client
from fireflyer.fs3.client.connection import TIMEOUT_S
from fireflyer.fs3.client.discovery import Place
from fireflyer.fs3.client.names import status_of
from fireflyer.fs3.client.settings import find_secret
from fireflyer.fs3.manager.chains import Chain, Public
from fireflyer.fs3.manager.link import ManagerLink
from fireflyer.fs3.manager.metrics import state_of
from fireflyer.fs3.manager.routing import SLOTS, TABLE, Node, Routing, Table
from fireflyer.fs3.manager.service import Status
from fireflyer.fs3.roles import Role

PIECE = 4 << 20
THREADS = 6
GROW_WAIT_S = 60.0


class Found:
    """File or directory of a tree: its name and its `os.lstat` result.

    Attributes:
        above: the directory that contains it; None: the top of the walk.
        name: name in the directory `above`; the whole path if `above` is None.
    """

    __slots__ = ("above", "name", "status")

    def __init__(self, name: str, status: os.stat_result, above: "Found | None" = None) -> None:
        self.name, self.status, self.above = name, status, above

    @property
    def path(self) -> str:
        """Path, assembled on each access, because paths deep in a tree are long."""
        names: list[str] = []
        one = self
        while one.above is not None:
            names.append(one.name)
            one = one.above
        if not names:
            return one.name
        slash = "" if one.name.endswith("/") else "/"
        return f"{one.name}{slash}{'/'.join(reversed(names))}"

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.status.st_mode)


def listing(client: Client, path: str) -> list[Found]:
    """Returns the contents of a directory, sorted; for a file, the file itself."""
    status = client.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        return [Found(path, client.lstat(path))]
    return _below(client, Found(path, status))


def _below(client: Client, one: Found) -> list[Found]:
    entries = client.entries_of(one.status.st_ino)
    return [Found(name, status_of(inode), one) for name, inode in entries]


def tree(
    client: Client, top: str, missed: Callable[[FileError], None] | None = None
) -> Iterator[Found]:
    """Yields a path and everything below it, top-down and sorted. Symlinks are not followed.

    The walk uses the inodes of directories, so a tree may have any depth.

    Args:
        missed: callback for the error of each directory that cannot be listed; None: raise the
            error.
    """
    waiting = [Found(top, client.lstat(top))]
    while waiting:
        one = waiting.pop()
        yield one
        if one.is_dir:
            try:
                waiting.extend(reversed(_below(client, one)))
            except FileNotFoundError:
                continue  # the directory was removed meanwhile
            except FileError as error:
                named = FileError(error.errno or errno.EIO, one.path)
                if missed is None:
                    raise named from error
                missed(named)


class Damage(msgspec.Struct):
    """File that cannot be read, and why."""

    path: str
    reason: str


class Checked(msgspec.Struct):
    """Result of `check`."""

    files: int
    bytes: int
    """Number of bytes read, without holes."""
    damages: list[Damage]
    unvisited: list[Damage]
    """Directories that cannot be listed; files below them were not read."""
    nodes: list[str]
    """Nodes that had damaged bytes.

    If another node has the bytes intact, they were read there, and the damage is repaired.
    """


def check(client: Client, top: str, advance: Callable[[int], None]) -> Checked:
    """Reads one replica of every chunk of the files at and below a path, and checks the CRCs.

    Args:
        advance: callback that gets the number of bytes done, with holes; any thread calls it.
    """

    def read(found: Found) -> tuple[int, Damage | None]:
        total, damage = 0, None
        try:
            with client.open_inode(found.status.st_ino, found.path) as file:
                memory = memoryview(bytearray(min(PIECE, file.size)))
                for offset, size in file.stretches(PIECE):
                    count = file.pread_into(memory[:size], offset)
                    advance(count)
                    total += count
                advance(max(0, file.size - total))
        except (FireflyerError, OSError) as error:
            removed = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ESTALE)
            damage = None if removed else Damage(found.path, str(error))
        return total, damage

    missed: list[FileError] = []
    files = [found for found in tree(client, top, missed.append) if found.is_file]
    with ThreadPoolExecutor(THREADS, "fs3-check") as threads:
        done = list(threads.map(read, files))
    size, damages = sum(total for total, _ in done), [its for _, its in done if its]
    unvisited = [Damage(str(its.filename), its.strerror or str(its)) for its in missed]
    return Checked(len(files), size, damages, unvisited, client.damaged_nodes())


class NodeState(msgspec.Struct):
    """State of a storage node. Fields from heartbeats are zero or empty before the first heartbeat."""

    node: int
    name: str
    address: str
    alive: bool
    targets: int
    free_targets: int
    """Targets in no chain."""
    heard_s: float | None
    """Seconds since its last heartbeat; None: the current primary manager has received none."""
    version: str = ""
    """Version of its software."""
    metrics: str = ""
    disk_bytes: int = 0
    free_bytes: int = 0
    kept_bytes: int = 0
    """Bytes of its disk that writes must leave free."""
    refuses: bool = False
    """True if the node rejects writes of whole chunks, because its disk is full."""
    faults: dict[int, str] = msgspec.field(default_factory=dict)
    """Targets that are closed or faulty, and why."""


class TargetState(msgspec.Struct):
    """State of a target, which is a member of a chain."""

    target: int
    node: str
    state: str
    local: str = ""
    """State that the target reports of itself."""
    chunks: int = 0
    bytes: int = 0
    busy_chunks: int = 0
    damaged: int = 0
    """Number of chunks that failed their CRC check since the target was opened."""
    scrubbed: int = 0
    """Time of the last complete scrub, in s since 1970; 0: never."""
    unrepaired: int = 0
    """Number of damaged chunks that are not repaired yet."""

    @property
    def name(self) -> str:
        return f"{self.node}/{self.target % SLOTS}"


class ChainState(msgspec.Struct):
    """State of a chain. A chain serves while one of its targets serves; it is whole if all do.

    The state of a chain is "unheard" until every target that is SERVING in the manager's records
    has been reported by a heartbeat.
    """

    chain: int
    version: int
    state: str
    targets: list[TargetState]


class Health(msgspec.Struct):
    """Condition of a file system."""

    manager: str
    epoch: int
    version: int
    software: str
    metrics: str
    nodes: list[NodeState]
    chains: list[ChainState]
    table: int
    """Newest version of the chain table."""
    troubles: list[str] = msgspec.field(default_factory=list)
    """Faults outside the nodes and chains."""


class Watch:
    """Connection to the manager, with a copy of the routing."""

    def __init__(self, place: Place) -> None:
        self.nodes: dict[int, Node] = {}
        self.chains: dict[int, Chain] = {}
        self.table = Table(TABLE, 0, ())
        self._routing_changed = threading.Condition()
        secret = find_secret(place.secret_file)
        self.link = ManagerLink(place.addresses, secret, Role.CLIENT, on_routing=self._on_routing)

    def _on_routing(self, part: Routing) -> None:
        with self._routing_changed:
            self.nodes.update((node.id, node) for node in part.nodes)
            self.chains.update((chain.id, chain) for chain in part.chains)
            for table in part.tables:
                if table.id == TABLE and table.version > self.table.version:
                    self.table = table
            self._routing_changed.notify_all()

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        with self._routing_changed:
            return self._routing_changed.wait_for(ready, seconds)

    def __enter__(self) -> "Watch":
        try:
            self.link.reach(TIMEOUT_S)
        except BaseException:
            self.link.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.link.close()


def health(place: Place) -> Health:
    """Returns the condition of a file system; raises WireError if no manager answers."""
    with Watch(place) as watch:
        status = watch.link.status()
        nodes, chains = dict(watch.nodes), dict(watch.chains)
        table = watch.table.version
    taken = {target for chain in chains.values() for target in chain.targets()}
    return Health(
        *(status.primary, status.epoch, status.version, status.software, status.metrics),
        [_node_state(node, status, taken) for _, node in sorted(nodes.items())],
        [_chain_state(chain, nodes, status) for _, chain in sorted(chains.items())],
        table,
        status.troubles,
    )


def _node_state(node: Node, status: Status, taken: set[int]) -> NodeState:
    state = NodeState(
        *(node.id, node.name, node.address, node.id in status.alive, node.slots),
        free_targets=len(set(node.targets()) - taken),
        heard_s=None,
    )
    if heard := status.heard.get(node.id):
        state.heard_s = heard.heard_s
        if its := heard.vitals:
            state.version, state.metrics, state.faults = its.version, its.metrics, its.faults
            state.disk_bytes, state.free_bytes = its.disk_bytes, its.free_bytes
            state.kept_bytes, state.refuses = its.kept_bytes, its.refuses
    return state


def _chain_state(chain: Chain, nodes: dict[int, Node], status: Status) -> ChainState:
    members = []
    for member in chain.members:
        node = member.target // SLOTS
        state = TargetState(member.target, nodes[node].name, member.state.name.lower())
        heard = status.heard.get(node)
        local = heard.locals.get(member.target) if heard else None
        if heard:
            if local:
                state.local = local.state.name.lower()
            its = heard.vitals.targets.get(member.target) if heard.vitals else None
            if its:
                state.chunks, state.bytes, state.busy_chunks = (
                    its.chunks,
                    its.bytes,
                    its.busy_chunks,
                )
                state.damaged, state.scrubbed = its.damaged, its.scrubbed
                state.unrepaired = its.unrepaired
        known = local is not None and local.incarnation == member.incarnation
        if member.state is Public.SERVING and not known:
            state.state = UNHEARD
        members.append(state)
    unheard = any(member.state == UNHEARD for member in members)
    return ChainState(chain.id, chain.version, UNHEARD if unheard else state_of(chain), members)


UNHEARD = "unheard"
"""State of a target that is SERVING in the manager's records, until its node's next heartbeat."""


LITTLE_SPACE = 0.05
"""Share of a disk; a node with less free space is reported."""


def problems(found: Health) -> list[str]:
    """Returns the problems for the operator, one line each, the worst first."""
    lines = found.troubles + [
        f"chain {chain.chain} {chain.state}: {members(chain)}"
        for state in ("stopped", "degraded", UNHEARD)
        for chain in found.chains
        if chain.state == state
    ]
    for node in found.nodes:
        if node.alive:
            lines += _problems_of(node, found)
        elif node.heard_s is None:
            lines.append(
                f"node {node.name} does not answer: the manager has received no heartbeat yet"
            )
        else:
            lines.append(
                f"node {node.name} does not answer: last heartbeat {node.heard_s:.1f} s ago"
            )
    for chain in found.chains:
        lines += [_damage_of(its) for its in chain.targets if its.damaged or its.unrepaired]
    return lines


def _damage_of(its: TargetState) -> str:
    found = f"{its.name} found {its.damaged} damaged chunks since it was opened"
    if not its.unrepaired:
        return f"{found}: all are repaired; see its log"
    return (
        f"{found}: {its.unrepaired} are not repaired, because no other replica has them intact; "
        "`fireflyer fs check` names the files"
    )


def _problems_of(node: NodeState, found: Health) -> Iterator[str]:
    for target, why in node.faults.items():
        yield f"{node.name}/{target % SLOTS}: {why}"
    if node.refuses:
        free, kept = (f"{number >> 20:,} MiB" for number in (node.free_bytes, node.kept_bytes))
        yield f"node {node.name}: disk full: refuses writes ({free} free, {kept} kept for repair)"
    elif node.disk_bytes and node.free_bytes < LITTLE_SPACE * node.disk_bytes:
        yield f"node {node.name} has {node.free_bytes / node.disk_bytes:.1%} of its disk left"
    if node.version and node.version != found.software:
        yield f"node {node.name} runs {node.version}, the manager {found.software}"
    if node.free_targets and found.chains:
        what = f"{node.free_targets} targets of node {node.name} are in no chain"
        yield f"{what}: `fireflyer fs grow` makes chains of them"


def members(chain: ChainState) -> str:
    """Returns the targets of a chain with their states, and the progress of syncing targets."""
    full = max((its.bytes for its in chain.targets if its.state == "serving"), default=0)
    words = []
    for its in chain.targets:
        word = f"{its.name} {its.state}"
        if its.state == "syncing" and full:
            word += f" (holds {min(its.bytes / full, 1):.0%} of the bytes)"
        words.append(word + (", faulty" if its.local == "faulty" else ""))
    return ", ".join(words)


class Grown(msgspec.Struct):
    """Result of `grow`."""

    version: int
    """Version of the chain table."""
    chains: int
    """Number of chains in the table, the new ones included."""
    added: list[int]
    replicas: int


def grow(place: Place, wait_s: float = GROW_WAIT_S) -> Grown:
    """Makes new chains of all free targets, with as many replicas as existing chains.

    New files use the new chains once all new chains serve; existing files are not moved.

    Raises:
        ConfigError: too few nodes have free targets, or a node with free targets does not answer.
        DeadlineExceeded: the chains were made, but not all of them served before the timeout.
    """
    with Watch(place) as watch:
        if not watch.table.chains:
            raise ConfigError("this file system has no chains yet: start its nodes first")
        before = watch.table
        alive = watch.link.status().alive
        taken = {target for chain in watch.chains.values() for target in chain.targets()}
        if all(set(node.targets()) <= taken for node in watch.nodes.values()):
            raise ConfigError(
                "no target is free: add [nodes.NAME] to cluster.toml, or more `targets` to a node, and "
                "start that process first"
            )
        for node in watch.nodes.values():
            if node.id not in alive and set(node.targets()) - taken:
                raise ConfigError(
                    f"node {node.name} has free targets but does not answer: start it"
                )
        replicas = len(watch.chains[before.chains[-1]].members)
        table = watch.link.lay_out(TABLE, replicas, version=before.version + 1)
        added = [chain for chain in table.chains if chain not in before.chains]

        def serve() -> bool:
            known = [watch.chains.get(chain) for chain in added]
            return all(chain and chain.targets(Public.SERVING) for chain in known)

        if not watch.wait(serve, wait_s):
            raise DeadlineExceeded(
                f"chains {', '.join(map(str, added))} were made, but not all serve after {wait_s:g} s"
            )
    return Grown(table.version, len(table.chains), added, replicas)
