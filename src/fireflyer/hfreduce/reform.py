"""Forming a group anew with fewer or more members, in place: over the members' own connections, no
store.

After a failure every survivor calls `reform`. They agree on the next view (`membership`) and make a
new group of its members. A newcomer calls `join` with the address of any member and the secret; it
is let in when the members next reform.
"""

import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from fireflyer.errors import (
    CollectiveError,
    ConfigError,
    DeadlineExceeded,
    FireflyerError,
    PeerLost,
    ProtocolMismatch,
    RankFailed,
    WireError,
)
from fireflyer.hfreduce import transport
from fireflyer.hfreduce.council import Council, decode, encode
from fireflyer.hfreduce.handshake import Lineage, Purpose
from fireflyer.hfreduce.membership import Decided, Membership, View
from fireflyer.hfreduce.rendezvous import Connection, Seat, establish
from fireflyer.hfreduce.switchboard import Line, discard, open_board
from fireflyer.hfreduce.topology import Card, Topology, interface_address
from fireflyer.rpc.frames import FrameBuffer, frame

GRACE_S = 5.0
"""How long a member that is not known to be dead is waited for."""


def reform(
    old: Connection, timeout_s: float, *, quorum: int | None = None, grace_s: float = GRACE_S
) -> Connection:
    """Makes a new group of the members of `old` that are alive, and of the newcomers that wait.

    Collective among the survivors, at any time after `old` has failed, or at a point that all have
    agreed on where it has not. Ranks are given anew: survivors in their old order, then newcomers.
    Operations of `old` that are under way end with an error.

    Args:
        old: is closed by this, however it ends. timeout_s: for this call. quorum: how many of the
        old members must agree; default more than half, or half with rank 0. With less,
            two parts of a network that was cut may both go on.
        grace_s: how long a member that is not known to be dead may take to call `reform`, too.

    Raises:
        DeadlineExceeded: no quorum came together.
        RankFailed: names this rank itself if the others formed the group without it.
        ConfigError: `old` was closed, or the quorum is no number of its members.
    """
    deadline = time.monotonic() + timeout_s
    if quorum is not None and not 1 <= quorum <= old.world:
        raise ConfigError(f"a quorum of {quorum} of {old.world} ranks: it must be 1 to {old.world}")
    seat = old.give_up_seat()
    if seat is None:
        raise ConfigError(
            "the group was closed, or an earlier reform of it failed: it cannot be formed anew"
        )
    terms = _Terms(deadline, quorum, grace_s)
    try:
        try:
            old.watch.rethrow()
        except FireflyerError:
            old.group.abort()  # what still waits need not wait any longer
        view = _agree(seat, old.cards, old.epoch + 1, old.watch.failed_ranks, terms)
        old.watch.leave(0.0)
        return _settle(seat, view, old.timeout_s, terms)
    except BaseException:
        old.watch.leave(0.0)
        seat.leave()
        raise


def join(
    addresses: Sequence[str],
    secret: bytes,
    timeout_s: float,
    *,
    master: str = "127.0.0.1",
    quorum: int | None = None,
    grace_s: float = GRACE_S,
) -> Connection:
    """Becomes a member of a running group when its members next call `reform`.

    Args:
        addresses: `join_address` of members; one that answers is enough.
        secret: of the group: FIREFLYER_SECRET, or the members' `seat.lineage.key`.
        timeout_s: for this call, and for the operations of the group.
        master: the address whose route tells which interface to listen on.
        quorum, grace_s: as for `reform`, should a member die meanwhile.

    Raises:
        DeadlineExceeded: not admitted in time.
        PeerLost: none of the addresses answers.
        ProtocolMismatch: a member did not prove the secret, or does not accept ours.
        ConfigError: an address that is none, or this process lacks the group's transport or has
            FIREFLYER_HFREDUCE_TRANSPORT set to another.
    """
    deadline = time.monotonic() + timeout_s
    doors = [_parse(address) for address in addresses]
    if len({name for _, name in doors}) != 1:
        raise ConfigError("the addresses to join must be of members of one group")
    lineage = Lineage(doors[0][1], secret)
    board = open_board()
    try:
        mine = transport.unsettled(board.card(interface_address(master)))
        line = Line(board, lineage.number("join"), -1, secret)
        view = _knock(line, [card for card, _ in doors], mine, deadline)
        transport.follow([member.card for member in view.members])
        rank = [member.card for member in view.members].index(mine)
        seat = Seat.take(board, lineage, view.epoch, rank, mine)
    except BaseException:
        board.release()
        raise
    try:
        return _settle(seat, view, timeout_s, _Terms(deadline, quorum, grace_s))
    except BaseException:
        seat.leave()
        raise


@dataclass(frozen=True)
class _Terms:
    deadline: float
    quorum: int | None
    grace_s: float


def _agree(
    seat: Seat,
    cards: Sequence[Card],
    epoch: int,
    dead: Callable[[], set[int]],
    terms: _Terms,
    neighbours: Collection[int] = (),
) -> View:
    """Agrees with the other members of the seat's epoch on the next, and moves there.

    Args:
        neighbours: may still wait for this rank, and have to hear that it gave up.
    """
    line = seat.line
    quorum = None if terms.quorum is None else min(terms.quorum, len(cards))
    machine = Membership(line.rank, cards, epoch, quorum)
    council = Council(line, machine, dead, seat.door.waiting, terms.grace_s)
    view = council.agree(terms.deadline, neighbours)
    rank = view.rank_of(line.rank)
    assert rank is not None
    seat.move(epoch, rank)
    seat.door.admit({member.card for member in view.members}, encode(Decided(view)))
    return view


def _settle(seat: Seat, view: View, timeout_s: float, terms: _Terms) -> Connection:
    """A group of the view's members; where one of them is lost meanwhile, of the next view's."""
    while True:
        cards = transport.spread([member.card for member in view.members])
        patience = min(terms.deadline, time.monotonic() + 2 * terms.grace_s)
        try:
            return establish(seat, view.epoch, cards, timeout_s, patience)
        except (WireError, CollectiveError) as error:
            if time.monotonic() >= terms.deadline or isinstance(error, ProtocolMismatch):
                raise
            lost = {error.rank} if isinstance(error, RankFailed) else set()
        links = Topology.of(cards).control_links()
        me = seat.line.rank
        neighbours = {a + b - me for a, b in links if me in (a, b)}
        view = _agree(seat, cards, view.epoch + 1, lost.copy, terms, neighbours)


def _parse(address: str) -> tuple[Card, bytes]:
    """A card to dial, and the name of the lineage."""
    where, _, name = address.partition("/")
    host, _, port = where.rpartition(":")
    try:
        return Card("", "", "", host, int(port)), bytes.fromhex(name)
    except ValueError as error:
        raise ConfigError(f"{address!r} is no address of a member: HOST:PORT/NAME") from error


def _knock(line: Line, doors: Sequence[Card], mine: Card, deadline: float) -> View:
    """Waits at one door after the other, while there are members behind them."""
    refused: WireError = PeerLost("no member of the group can be reached")
    for door in doors:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            sock = line.dial(-1, door, Purpose.JOIN, left)
        except (PeerLost, DeadlineExceeded) as error:
            refused = error
            continue
        try:
            sock.settimeout(left)
            sock.sendall(frame(msgspec.json.encode(mine)))
            if (view := _await_view(sock, deadline)) is not None:
                return view
            refused = PeerLost(f"the member at {door.address}:{door.port} went away")
        except TimeoutError:
            break
        except OSError as error:
            refused = PeerLost(f"the member at {door.address}:{door.port} went away: {error}")
        finally:
            discard(sock)
    if time.monotonic() >= deadline:
        raise DeadlineExceeded("the members of the group did not let this process in in time")
    raise refused


def _await_view(sock: socket.socket, deadline: float) -> View | None:
    """None where the connection ends before."""
    frames = FrameBuffer()
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        data = sock.recv(1 << 16)
        for payload in frames.feed(data):
            message = decode(payload)
            if isinstance(message, Decided):
                return message.view
        if not data:
            return None
