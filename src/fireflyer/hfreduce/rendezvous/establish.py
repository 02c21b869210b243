"""Rendezvous: the ranks of a group find each other and connect.

Every rank publishes its `RankInfo` in a store and reads those of all other ranks. A `RankInfo`
tells where the rank runs and how to reach its connection listener. The store is not needed
afterwards. Unix sockets connect every pair of ranks on a host and transfer the descriptors of
shared memory. Control links connect the ranks of all hosts; by them the watch (`native.Watch`)
detects deaths. `Links` makes payload connections when they are first needed.
"""

import contextlib
import itertools
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from fireflyer._native import hfreduce as native
from fireflyer.errors import (
    CollectiveError,
    ConfigError,
    DeadlineExceeded,
    PeerLost,
    ProtocolMismatch,
    RankFailed,
    WireError,
)
from fireflyer.finalizer import Finalizer
from fireflyer.hfreduce import cores, rules, transport
from fireflyer.hfreduce.placement import create_control
from fireflyer.hfreduce.rendezvous.connection_listener import (
    ConnectionListener,
    GroupEndpoint,
    discard,
    give_away,
    open_listener,
    process_of,
)
from fireflyer.hfreduce.rendezvous.handshake import Lineage, Purpose
from fireflyer.hfreduce.rendezvous.join_listener import JoinListener
from fireflyer.hfreduce.rendezvous.payload_links import Links
from fireflyer.hfreduce.rendezvous.peer_exchange import PeerExchange, Store
from fireflyer.hfreduce.topology import RankInfo as RankInfo
from fireflyer.hfreduce.topology import Topology as Topology
from fireflyer.hfreduce.topology import interface_address as interface_address

_PAST_EPOCHS = 16
_PING_S = 0.5


@dataclass
class RankSlot:
    """Resources of a process that outlive an epoch: connection listener and endpoints.

    Attributes:
        info: tells other ranks how to reach this process.
        endpoint: endpoint of the present epoch. Endpoints of past epochs tell stragglers the next view.
    """

    listener: ConnectionListener
    lineage: Lineage
    info: RankInfo
    join_listener: JoinListener
    endpoint: GroupEndpoint
    past: deque[GroupEndpoint] = field(default_factory=deque)

    @classmethod
    def take(
        cls, listener: ConnectionListener, lineage: Lineage, epoch: int, rank: int, info: RankInfo
    ) -> "RankSlot":
        """Makes a slot that takes over one use of `listener`; on an error the use stays the
        caller's."""
        endpoint = listener.endpoint(lineage.number(epoch), rank, lineage.key)
        try:
            return cls(listener, lineage, info, JoinListener(listener, lineage), endpoint)
        except BaseException:
            endpoint.close()
            raise

    def move(self, epoch: int, rank: int) -> None:
        """Moves to another epoch."""
        endpoint = self.listener.endpoint(self.lineage.number(epoch), rank, self.lineage.key)
        self.past.append(self.endpoint)
        if len(self.past) > _PAST_EPOCHS:
            self.past.popleft().close()
        self.endpoint = endpoint

    def leave(self) -> None:
        """Frees all resources. Must be called only once."""
        for endpoint in (*self.past, self.endpoint):
            endpoint.close()
        self.join_listener.close()
        self.listener.release()


class Connection:
    """A rank's membership in one epoch of a group. Owns all its resources.

    Attributes:
        infos: infos of all ranks.
        group: the engine.
        watch: detects deaths, and fails the operations of `group` after a death.
        links: makes payload connections.
    """

    def __init__(
        self, slot: RankSlot, epoch: int, infos: Sequence[RankInfo], timeout_s: float
    ) -> None:
        self.slot = slot
        self.epoch = epoch
        self.infos = tuple(infos)
        self.rank = slot.endpoint.rank
        self.world = len(infos)
        self.timeout_s = timeout_s
        self.topology = Topology.of(list(infos))
        self.links = Links(slot.endpoint, self.infos, timeout_s)
        self.watch = native.Watch(rank=self.rank, world=self.world)
        self.group: native.Group
        self.p2p: native.P2PEngine
        self._ended = Finalizer(self, _leave, self.watch, slot)

    @property
    def join_address(self) -> str:
        """Address at which a newcomer with the secret requests admission: see `reform.join`."""
        return self.join_addresses[self.rank]

    @property
    def join_addresses(self) -> list[str]:
        """`join_address` of every member, by rank."""
        name = self.slot.lineage.name.hex()
        return [f"{info.address}:{info.port}/{name}" for info in self.infos]

    def close(self) -> None:
        """Tells the other ranks that this rank leaves, and frees the group's resources.

        The engine is freed with its last user. Idempotent; garbage collection of the connection and
        the end of the process also do this.
        """
        self._ended()

    def give_up_slot(self) -> RankSlot | None:
        """Passes the slot to the caller; returns None if the slot was already left. The watch
        continues."""
        return self.slot if self._ended.detach() else None


def _leave(watch: native.Watch, slot: RankSlot) -> None:
    watch.leave()
    slot.leave()


def connect(
    store: Store,
    rank: int,
    world: int,
    timeout_s: float,
    master: str = "127.0.0.1",
    still_useful: Callable[[], None] = lambda: None,
) -> Connection:
    """Joins `world` ranks into a group. Collective.

    Args:
        store: store that exactly these ranks share, with no keys of an earlier group.
        timeout_s: limit for each operation of the group, and for this call.
        master: MASTER_ADDR; the route to it determines the interface to listen on.
        still_useful: see `PeerExchange`.

    Raises:
        CollectiveError: a host has too many ranks, or the transport is UCX and UCX does not start.
        DeadlineExceeded: a rank did not arrive in time.
        RankFailed: a rank died during the call.
        ProtocolMismatch: a peer failed to prove the secret.
        NoSpace: the system refused the shared memory.
        ConfigError: rank 0's FIREFLYER_HFREDUCE_TABLE names no table, the ranks choose different
            FIREFLYER_HFREDUCE_TRANSPORT, or a rank lacks the transport that it chose.
    """
    deadline = time.monotonic() + timeout_s
    exchange = PeerExchange(store, rank, world, timeout_s, still_useful)
    with contextlib.ExitStack() as undo:
        try:
            address = interface_address(master)
            listener = open_listener()
            undo.callback(listener.release)
            info = transport.publish(listener.info(address))
            if rank == 0:
                info = rules.publish(msgspec.structs.replace(info, group=secrets.token_hex(16)))
            name = info.group or exchange.info_of(0).group
            lineage = Lineage(bytes.fromhex(name), exchange.key(address))
        except (ConfigError, CollectiveError) as error:
            with contextlib.suppress(RuntimeError):  # the store itself may have failed
                exchange.refuse(str(error))
            raise
        # A rank that has read the info may dial, so the endpoint must exist before the info is
        # published.
        slot = RankSlot.take(listener, lineage, 0, rank, info)
        undo.pop_all()
        undo.callback(slot.leave)
        exchange.publish(info)
        infos = rules.spread(_infos(exchange, slot.endpoint, world, info))
        transport.agree(infos)
        connection = establish(slot, 0, infos, timeout_s, deadline)
        undo.pop_all()
        return connection


def establish(
    slot: RankSlot, epoch: int, infos: Sequence[RankInfo], timeout_s: float, deadline: float
) -> Connection:
    """Makes one group of the processes with these infos. Collective; needs no store.

    Takes over `slot`. On an error the caller keeps the slot, and the call fails on all ranks.

    Raises:
        RankFailed: a rank cannot be reached, or died during the call.
        DeadlineExceeded, ProtocolMismatch, CollectiveError, NoSpace: see `connect`.
    """
    native.set_thread_cpus(cores.chosen())
    connection = Connection(slot, epoch, infos, timeout_s)
    watch, rank = connection.watch, connection.rank
    sockets: dict[int, socket.socket] = {}
    try:
        index, me = connection.topology.place(rank)
        team = connection.topology.hosts[index]
        links = connection.topology.control_links()
        peers = {a + b - rank for a, b in links if rank in (a, b)}
        for peer, sock in _meet(connection, Purpose.CONTROL, peers, deadline):
            watch.add_link(peer, give_away(sock))
        for peer, sock in _meet(connection, Purpose.TEAM, set(team) - {rank}, deadline):
            sockets[peer] = sock
            if (process := process_of(sock)) >= 0:
                watch.add_process(peer, process)
        control = _share_control(team, rank, infos[rank].address, sockets, deadline)
        machine = infos[rank].machine
        connection.group = native.Group(
            rank=rank,
            world=connection.world,
            timeout_s=timeout_s,
            spin=cores.may_spin([info for info in infos if info.machine == machine]),
            control=control,
            members=[_member(peer, sockets.get(peer)) for peer in team],
            me=me,
            hosts=[list(ranks) for ranks in connection.topology.hosts],
            host=index,
            zones=connection.topology.zones,
            transport=transport.kind_of(infos[0]),
        )
        connection.group.set_rules(rules.rules_of(infos[0]))
        connection.p2p = native.P2PEngine(rank=rank, world=connection.world)
        watch.attach(connection.group, connection.p2p)
        if len(connection.topology.hosts) > 1:
            connection.links.attach(Purpose.DATA, connection.group)
        connection.links.attach(Purpose.POST, connection.p2p)
        return connection
    except BaseException as error:
        connection.give_up_slot()
        for sock in sockets.values():
            discard(sock)
        try:
            if isinstance(error, WireError) and not isinstance(error, ProtocolMismatch):
                watch.rethrow()  # the watch knows the cause better
        finally:
            # The other ranks must fail for the same reason, not because this rank is gone.
            named = error.rank if isinstance(error, RankFailed) else -1
            watch.announce(f"rank {rank} could not join the group: {error}", named)
            watch.leave(0.0)
            watch.drop_links()
        raise


def _meet(
    connection: Connection, purpose: Purpose, peers: Iterable[int], deadline: float
) -> Iterator[tuple[int, socket.socket]]:
    """Yields a connection to each of `peers` when it is made; the higher rank of a pair dials."""
    endpoint = connection.slot.endpoint
    for peer in sorted(peer for peer in peers if peer < endpoint.rank):
        left = max(0.001, deadline - time.monotonic())
        try:
            yield peer, endpoint.dial(peer, connection.infos[peer], purpose, left)
        except PeerLost as error:
            raise RankFailed(f"no connection to rank {peer}: {error}", peer) from error
    missing = {peer for peer in peers if peer > endpoint.rank}
    check = _Check(connection, purpose, missing)
    while missing:
        peer, sock = endpoint.take(purpose, missing, deadline, check)
        missing.discard(peer)
        yield peer, sock


class _Check:
    """Callable that raises an error if ranks that are still missing cannot come."""

    def __init__(self, connection: Connection, purpose: Purpose, missing: set[int]) -> None:
        self._connection = connection
        self._purpose = purpose
        self._missing = missing
        self._pings = 0
        self._next_ping = time.monotonic() + _PING_S

    def __call__(self) -> None:
        connection = self._connection
        endpoint = connection.slot.endpoint
        connection.watch.rethrow()
        # The callers for REFORM are read before the callers for this purpose. A rank that connects
        # in between counts as connected, so this rank does not blame it.
        given_up = self._missing.intersection(endpoint.callers(Purpose.REFORM))
        missing = self._missing.difference(endpoint.callers(self._purpose))
        if given_up := given_up & missing:
            raise CollectiveError(
                f"rank {min(given_up)} could not join the group and stopped trying"
            )
        if not missing or time.monotonic() < self._next_ping:
            return
        peer = sorted(missing)[self._pings % len(missing)]
        self._pings += 1
        _ping(endpoint, peer, connection.infos[peer])
        self._next_ping = time.monotonic() + _PING_S


def _infos(
    exchange: PeerExchange, endpoint: GroupEndpoint, world: int, own: RankInfo
) -> list[RankInfo]:
    """Returns all ranks' infos; meanwhile detects the death of ranks whose info has arrived."""
    known = {endpoint.rank: own}
    turns = itertools.count()

    def look_around() -> None:
        if others := sorted(known.keys() - {endpoint.rank}):
            peer = others[next(turns) % len(others)]
            try:
                _ping(endpoint, peer, known[peer])
            except RankFailed as lost:
                raise exchange.judge(lost) from lost

    for rank in range(world):
        if rank not in known:
            known[rank] = exchange.info_of(rank, look_around)
    return [known[rank] for rank in range(world)]


def _ping(endpoint: GroupEndpoint, peer: int, info: RankInfo) -> None:
    try:
        discard(endpoint.dial(peer, info, Purpose.PING, _PING_S))
    except PeerLost as error:
        raise RankFailed(f"rank {peer} died or left: {error}", peer) from error
    except DeadlineExceeded:
        pass  # the process is frozen; the overall deadline decides


def _member(rank: int, sock: socket.socket | None) -> tuple[int, int, int]:
    """Returns (rank, socket, pidfd) for the engine, which then owns both descriptors; -1:
    missing."""
    if sock is None:
        return rank, -1, -1
    process = process_of(sock)
    return rank, give_away(sock), process


def _share_control(
    team: Sequence[int],
    rank: int,
    address: str,
    sockets: dict[int, socket.socket],
    deadline: float,
) -> int:
    """Returns the control segment, which the host's first rank creates and passes to the others.

    Returns -1 if the host has only one rank.
    """
    if len(team) == 1:
        return -1
    if rank == team[0]:
        control = create_control(len(team), address)
        try:
            for sock in sockets.values():
                socket.send_fds(sock, [b"c"], [control])
        except OSError as error:
            os.close(control)
            raise PeerLost(
                "a rank on this host ended before it received the shared memory"
            ) from error
        return control
    first = sockets[team[0]]
    first.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        data, fds, _, _ = socket.recv_fds(first, 1, 1)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"rendezvous: rank {team[0]} did not share memory in time"
        ) from error
    except OSError as error:
        raise PeerLost(f"rank {team[0]} ended before it shared memory: {error}") from error
    first.settimeout(None)
    if not data or not fds:
        raise PeerLost(f"rank {team[0]} ended before it shared memory")
    return fds[0]
