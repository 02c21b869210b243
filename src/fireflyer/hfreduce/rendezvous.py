"""How the ranks of a group find each other and become one.

Every rank publishes a card in a store and reads everybody's: who is where, and how his switchboard
is reached. Then nobody needs the store again. Ranks of one host are joined by Unix sockets (every
pair), over which segments are passed; all ranks by control links, on which the watch hears of
deaths. Payload connections are made by `Links` when they are first needed.
"""

import contextlib
import functools
import hashlib
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fireflyer._native import hfreduce as native
from fireflyer.errors import (
    DeadlineExceeded,
    PeerLost,
    ProtocolMismatch,
    RankFailed,
    WireError,
)
from fireflyer.hfreduce.handshake import Purpose
from fireflyer.hfreduce.links import Links
from fireflyer.hfreduce.placement import create_control
from fireflyer.hfreduce.switchboard import (
    Line,
    Switchboard,
    discard,
    give_away,
    open_board,
    process_of,
)
from fireflyer.hfreduce.topology import Card as Card
from fireflyer.hfreduce.topology import Topology as Topology
from fireflyer.hfreduce.topology import interface_address as interface_address
from fireflyer.log import get_logger


class Store(Protocol):
    """What the rendezvous needs of a store; `torch.distributed` stores have it. `get` blocks."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...


@dataclass(frozen=True)
class Lineage:
    """What stays the same when a group is formed anew with other members.

    Attributes:
        name: 16 random bytes; with the epoch they give the number of its line.
        key: what members prove to each other.
    """

    name: bytes
    key: bytes

    def number(self, epoch: int | str) -> bytes:
        """The line's number in one epoch, or of the line for another purpose."""
        return hashlib.sha256(self.name + str(epoch).encode()).digest()[:16]


class Connection:
    """A rank's membership in a group that is up. Owns everything in it.

    Attributes:
        cards: of all ranks.
        group: the engine.
        watch: sees deaths; fails `group` with them.
        links: makes payload connections.
        line: where further calls for this group arrive.
    """

    def __init__(
        self,
        lineage: Lineage,
        epoch: int,
        board: Switchboard,
        line: Line,
        cards: Sequence[Card],
        timeout_s: float,
    ) -> None:
        self.lineage = lineage
        self.epoch = epoch
        self.board = board
        self.line = line
        self.cards = tuple(cards)
        self.rank = line.rank
        self.world = len(cards)
        self.timeout_s = timeout_s
        self.topology = Topology.of(list(cards))
        self.links = Links(line, self.cards, timeout_s)
        self.watch = native.Watch(rank=self.rank, world=self.world)
        self.group: native.Group
        self.post: native.Post
        self._ended = weakref.finalize(self, _leave, self.watch, line, board)

    def close(self) -> None:
        """Says goodbye to the others and frees what the group held; the engine goes with its last
        user.

        Idempotent; also done when the connection is dropped and at the end of the process.
        """
        self._ended()

    def abandon(self) -> None:
        """Leaves without a goodbye: to the others this rank has failed. Line and switchboard stay
        the caller's."""
        if self._ended.detach() is not None:
            self.watch.drop_links()


def _leave(watch: native.Watch, line: Line, board: Switchboard) -> None:
    watch.leave(0)
    line.close()
    board.release()


def connect(
    store: Store, rank: int, world: int, timeout_s: float, master: str = "127.0.0.1"
) -> Connection:
    """Joins `world` ranks into a group. Collective.

    Args:
        store: shared by exactly these ranks, with no keys of an earlier group.
        timeout_s: for each operation of the group, and for this call.
        master: the address whose route tells which interface to listen on (MASTER_ADDR).

    Raises:
        CollectiveError: too many ranks on one host.
        DeadlineExceeded: a rank did not arrive in time.
        RankFailed: a rank died meanwhile.
        ProtocolMismatch: a peer failed to prove the secret.
        NoSpace: shared memory was refused.
    """
    deadline = time.monotonic() + timeout_s
    address = interface_address(master)
    with contextlib.ExitStack() as stack:
        board = open_board()
        stack.callback(board.release)
        card = board.card(address)
        if rank == 0:
            card = msgspec.structs.replace(card, group=secrets.token_hex(16))
            name = card.group
        else:
            name = msgspec.json.decode(store.get("card/0"), type=Card).group
        lineage = Lineage(bytes.fromhex(name), _key(store, rank, address))
        # Whoever has read our card may call: the line is there before it.
        line = board.line(lineage.number(0), rank, lineage.key)
        stack.callback(line.close)
        cards = _exchange(store, rank, world, card)
        connection = establish(lineage, 0, board, line, cards, timeout_s, deadline)
        stack.pop_all()
        return connection


def establish(
    lineage: Lineage,
    epoch: int,
    board: Switchboard,
    line: Line,
    cards: Sequence[Card],
    timeout_s: float,
    deadline: float,
) -> Connection:
    """Makes one group of the processes with these cards. Collective; no store.

    Takes over `board` (one use of it) and `line`, unless it raises.

    Raises:
        RankFailed: a rank cannot be reached or died meanwhile.
        DeadlineExceeded, ProtocolMismatch, CollectiveError, NoSpace: see `connect`.
    """
    connection = Connection(lineage, epoch, board, line, cards, timeout_s)
    watch, rank = connection.watch, line.rank
    sockets: dict[int, socket.socket] = {}
    try:
        index, me = connection.topology.place(rank)
        team = connection.topology.hosts[index]
        links = connection.topology.control_links()
        peers = {a + b - rank for a, b in links if rank in (a, b)}
        for peer, sock in _meet(connection, Purpose.CONTROL, peers, deadline).items():
            watch.add_link(peer, give_away(sock))
        sockets = _meet(connection, Purpose.TEAM, set(team) - {rank}, deadline)
        for peer, sock in sockets.items():
            if (process := process_of(sock)) >= 0:
                watch.add_process(peer, process)
        control = _share_control(team, rank, cards[rank].address, sockets, deadline)
        here = sum(card.machine == board.machine for card in cards)
        connection.group = native.Group(
            rank=rank,
            world=connection.world,
            timeout_s=timeout_s,
            spin=here <= len(os.sched_getaffinity(0)),
            control=control,
            members=[_member(peer, sockets.get(peer)) for peer in team],
            me=me,
            hosts=[list(ranks) for ranks in connection.topology.hosts],
            host=index,
            zones=connection.topology.zones,
        )
        if len(connection.topology.hosts) > 1:
            connection.links.attach(Purpose.DATA, connection.group)
        connection.post = native.Post(rank=rank, world=connection.world)
        connection.links.attach(Purpose.POST, connection.post)
        watch.attach(connection.group, connection.post)
        return connection
    except BaseException as error:
        connection.abandon()
        for sock in sockets.values():
            discard(sock)
        if isinstance(error, WireError) and not isinstance(error, ProtocolMismatch):
            watch.rethrow()  # it knows better why somebody did not answer
        raise


def _meet(
    connection: Connection, purpose: Purpose, peers: Iterable[int], deadline: float
) -> dict[int, socket.socket]:
    """A connection with each of `peers`; of two ranks the later one dials."""
    line = connection.line
    met: dict[int, socket.socket] = {}
    try:
        for peer in (peer for peer in peers if peer < line.rank):
            left = max(0.001, deadline - time.monotonic())
            try:
                met[peer] = line.dial(peer, connection.cards[peer], purpose, left)
            except PeerLost as error:
                raise RankFailed(f"no connection to rank {peer}: {error}", peer) from error
        callers = [peer for peer in peers if peer > line.rank]
        return met | line.take(purpose, callers, deadline, connection.watch.rethrow)
    except BaseException:
        for sock in met.values():
            discard(sock)
        raise


def _exchange(store: Store, rank: int, world: int, card: Card) -> list[Card]:
    store.set(f"card/{rank}", msgspec.json.encode(card).decode())
    return [msgspec.json.decode(store.get(f"card/{r}"), type=Card) for r in range(world)]


def _key(store: Store, rank: int, address: str) -> bytes:
    """The job's secret; without one, a random key through the store, which is only as safe as
    it."""
    if secret := os.environ.get("FIREFLYER_SECRET"):
        return secret.encode()
    if rank == 0:
        store.set("key", secrets.token_hex(32))
        if not address.startswith("127."):
            _warn_of_no_secret()
    return store.get("key")


@functools.cache
def _warn_of_no_secret() -> None:
    get_logger("hfreduce").warning(
        "no FIREFLYER_SECRET: connections beyond this machine are only as safe as the store"
    )


def _member(rank: int, sock: socket.socket | None) -> tuple[int, int, int]:
    """(rank, socket, pidfd) for the engine, which owns both; -1 where there is none."""
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
    """The control segment: made by the host's first rank and passed to the others; -1 for one
    alone."""
    if len(team) == 1:
        return -1
    if rank == team[0]:
        control = create_control(len(team), address)
        try:
            for sock in sockets.values():
                socket.send_fds(sock, [b"c"], [control])
        except OSError as error:
            os.close(control)
            raise PeerLost("a rank of this host left before sharing memory") from error
        return control
    first = sockets[team[0]]
    first.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        data, fds, _, _ = socket.recv_fds(first, 1, 1)
    except TimeoutError as error:
        raise DeadlineExceeded(f"rendezvous: rank {team[0]} shared no memory in time") from error
    except OSError as error:
        raise PeerLost(f"rank {team[0]} left before sharing memory: {error}") from error
    first.settimeout(None)
    if not data or not fds:
        raise PeerLost(f"rank {team[0]} left before sharing memory")
    return fds[0]
