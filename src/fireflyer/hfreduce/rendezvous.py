"""How the ranks of a group find each other and become one.

Every rank publishes a card in a store and reads everybody's: who is where, and how his switchboard
is reached. Then nobody needs the store again. Ranks of one host are joined by Unix sockets (every
pair), over which segments are passed; all ranks by control links, on which the watch hears of
deaths. Payload connections are made by `Links` when they are first needed.
"""

import contextlib
import itertools
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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
from fireflyer.hfreduce.door import Door
from fireflyer.hfreduce.handshake import Lineage, Purpose
from fireflyer.hfreduce.links import Links
from fireflyer.hfreduce.placement import create_control
from fireflyer.hfreduce.roll_call import RollCall, Store
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

_PAST_EPOCHS = 16
_PING_S = 0.5


@dataclass
class Seat:
    """What a process keeps from epoch to epoch of a group: its use of the switchboard, and its
    lines.

    Attributes:
        card: how the others reach this process.
        line: of the present epoch. Those of past epochs tell stragglers what came after.
    """

    board: Switchboard
    lineage: Lineage
    card: Card
    door: Door
    line: Line
    past: deque[Line] = field(default_factory=deque)

    @classmethod
    def take(
        cls, board: Switchboard, lineage: Lineage, epoch: int, rank: int, card: Card
    ) -> "Seat":
        """Takes over one use of `board`, unless it raises."""
        line = board.line(lineage.number(epoch), rank, lineage.key)
        try:
            return cls(board, lineage, card, Door(board, lineage), line)
        except BaseException:
            line.close()
            raise

    def move(self, epoch: int, rank: int) -> None:
        """To another epoch."""
        line = self.board.line(self.lineage.number(epoch), rank, self.lineage.key)
        self.past.append(self.line)
        if len(self.past) > _PAST_EPOCHS:
            self.past.popleft().close()
        self.line = line

    def leave(self) -> None:
        """Frees all of it. Called once."""
        for line in (*self.past, self.line):
            line.close()
        self.door.close()
        self.board.release()


class Connection:
    """A rank's membership in one epoch of a group. Owns everything in it.

    Attributes:
        cards: of all ranks.
        group: the engine.
        watch: sees deaths; fails `group` with them.
        links: makes payload connections.
    """

    def __init__(self, seat: Seat, epoch: int, cards: Sequence[Card], timeout_s: float) -> None:
        self.seat = seat
        self.epoch = epoch
        self.cards = tuple(cards)
        self.rank = seat.line.rank
        self.world = len(cards)
        self.timeout_s = timeout_s
        self.topology = Topology.of(list(cards))
        self.links = Links(seat.line, self.cards, timeout_s)
        self.watch = native.Watch(rank=self.rank, world=self.world)
        self.group: native.Group
        self.post: native.Post
        self._ended = Finalizer(self, _leave, self.watch, seat)

    @property
    def join_address(self) -> str:
        """Where a newcomer with the secret can ask this member for admission: see `reform.join`."""
        return self.join_addresses[self.rank]

    @property
    def join_addresses(self) -> list[str]:
        """Of all members, by rank."""
        name = self.seat.lineage.name.hex()
        return [f"{card.address}:{card.port}/{name}" for card in self.cards]

    def close(self) -> None:
        """Says goodbye to the others and frees what the group held; the engine goes with its last
        user.

        Idempotent; also done when the connection is dropped and at the end of the process.
        """
        self._ended()

    def give_up_seat(self) -> Seat | None:
        """The caller owns the seat from now on; None if it was left already. The watch goes on."""
        return self.seat if self._ended.detach() else None


def _leave(watch: native.Watch, seat: Seat) -> None:
    watch.leave()
    seat.leave()


def connect(
    store: Store, rank: int, world: int, timeout_s: float, master: str = "127.0.0.1"
) -> Connection:
    """Joins `world` ranks into a group. Collective.

    Args:
        store: shared by exactly these ranks, with no keys of an earlier group.
        timeout_s: for each operation of the group, and for this call.
        master: the address whose route tells which interface to listen on (MASTER_ADDR).

    Raises:
        CollectiveError: too many ranks on one host, or the UCX that is to be used does not start.
        DeadlineExceeded: a rank did not arrive in time.
        RankFailed: a rank died meanwhile.
        ProtocolMismatch: a peer failed to prove the secret.
        NoSpace: shared memory was refused.
        ConfigError: rank 0's FIREFLYER_HFREDUCE_TABLE names no table, or the ranks' choices of
            FIREFLYER_HFREDUCE_TRANSPORT differ, or one lacks what it has chosen.
    """
    deadline = time.monotonic() + timeout_s
    roll = RollCall(store, rank, world, timeout_s)
    with contextlib.ExitStack() as undo:
        try:
            address = interface_address(master)
            board = open_board()
            undo.callback(board.release)
            card = transport.publish(board.card(address))
            if rank == 0:
                card = rules.publish(msgspec.structs.replace(card, group=secrets.token_hex(16)))
            name = card.group or roll.card_of(0).group
            lineage = Lineage(bytes.fromhex(name), roll.key(address))
        except (ConfigError, CollectiveError) as error:
            with contextlib.suppress(RuntimeError):  # the store itself may be what failed
                roll.refuse(str(error))
            raise
        # Whoever has read our card may call: the line is there before it.
        seat = Seat.take(board, lineage, 0, rank, card)
        undo.pop_all()
        undo.callback(seat.leave)
        roll.publish(card)
        cards = rules.spread(_cards(roll, seat.line, world, card))
        transport.agree(cards)
        connection = establish(seat, 0, cards, timeout_s, deadline)
        undo.pop_all()
        return connection


def establish(
    seat: Seat, epoch: int, cards: Sequence[Card], timeout_s: float, deadline: float
) -> Connection:
    """Makes one group of the processes with these cards. Collective; no store.

    Owns `seat` from then on, unless it raises; then it fails on all ranks.

    Raises:
        RankFailed: a rank cannot be reached or died meanwhile.
        DeadlineExceeded, ProtocolMismatch, CollectiveError, NoSpace: see `connect`.
    """
    native.set_thread_cpus(cores.chosen())
    connection = Connection(seat, epoch, cards, timeout_s)
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
        control = _share_control(team, rank, cards[rank].address, sockets, deadline)
        machine = cards[rank].machine
        connection.group = native.Group(
            rank=rank,
            world=connection.world,
            timeout_s=timeout_s,
            spin=cores.may_spin([card for card in cards if card.machine == machine]),
            control=control,
            members=[_member(peer, sockets.get(peer)) for peer in team],
            me=me,
            hosts=[list(ranks) for ranks in connection.topology.hosts],
            host=index,
            zones=connection.topology.zones,
            transport=transport.kind_of(cards[0]),
        )
        connection.group.set_rules(rules.rules_of(cards[0]))
        connection.post = native.Post(rank=rank, world=connection.world)
        watch.attach(connection.group, connection.post)
        if len(connection.topology.hosts) > 1:
            connection.links.attach(Purpose.DATA, connection.group)
        connection.links.attach(Purpose.POST, connection.post)
        return connection
    except BaseException as error:
        connection.give_up_seat()
        for sock in sockets.values():
            discard(sock)
        try:
            if isinstance(error, WireError) and not isinstance(error, ProtocolMismatch):
                watch.rethrow()  # it knows better why somebody did not answer
        finally:
            # The others fail for the same reason, and not because this rank is gone.
            named = error.rank if isinstance(error, RankFailed) else -1
            watch.announce(f"rank {rank} did not get into the group: {error}", named)
            watch.leave(0.0)
            watch.drop_links()
        raise


def _meet(
    connection: Connection, purpose: Purpose, peers: Iterable[int], deadline: float
) -> Iterator[tuple[int, socket.socket]]:
    """A connection with each of `peers`, as they come; of two ranks the later one dials."""
    line = connection.seat.line
    for peer in sorted(peer for peer in peers if peer < line.rank):
        left = max(0.001, deadline - time.monotonic())
        try:
            yield peer, line.dial(peer, connection.cards[peer], purpose, left)
        except PeerLost as error:
            raise RankFailed(f"no connection to rank {peer}: {error}", peer) from error
    missing = {peer for peer in peers if peer > line.rank}
    check = _Check(connection, purpose, missing)
    while missing:
        peer, sock = line.take(purpose, missing, deadline, check)
        missing.discard(peer)
        yield peer, sock


class _Check:
    """Raises when ranks that are waited for will not come."""

    def __init__(self, connection: Connection, purpose: Purpose, missing: set[int]) -> None:
        self._connection = connection
        self._purpose = purpose
        self._missing = missing
        self._pings = 0
        self._next_ping = time.monotonic() + _PING_S

    def __call__(self) -> None:
        connection = self._connection
        line = connection.seat.line
        connection.watch.rethrow()
        # In this order: whoever has connected may have gone on meanwhile, or left, and is not to blame.
        given_up = self._missing.intersection(line.callers(Purpose.REFORM))
        missing = self._missing.difference(line.callers(self._purpose))
        if given_up := given_up & missing:
            raise CollectiveError(f"rank {min(given_up)} did not get into the group and gave it up")
        if not missing or time.monotonic() < self._next_ping:
            return
        peer = sorted(missing)[self._pings % len(missing)]
        self._pings += 1
        _ping(line, peer, connection.cards[peer])
        self._next_ping = time.monotonic() + _PING_S


def _cards(roll: RollCall, line: Line, world: int, own: Card) -> list[Card]:
    """All ranks' cards. Whoever has published his and is gone is noticed while others are waited for."""
    known = {line.rank: own}
    turns = itertools.count()

    def look_around() -> None:
        if others := sorted(known.keys() - {line.rank}):
            peer = others[next(turns) % len(others)]
            try:
                _ping(line, peer, known[peer])
            except RankFailed as lost:
                raise roll.judge(lost) from lost

    for rank in range(world):
        if rank not in known:
            known[rank] = roll.card_of(rank, look_around)
    return [known[rank] for rank in range(world)]


def _ping(line: Line, peer: int, card: Card) -> None:
    try:
        discard(line.dial(peer, card, Purpose.PING, _PING_S))
    except PeerLost as error:
        raise RankFailed(f"rank {peer} died or left: {error}", peer) from error
    except DeadlineExceeded:
        pass  # frozen; that is for the deadline of the whole to judge


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
