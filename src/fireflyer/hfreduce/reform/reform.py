"""Forms a group anew, in place, with fewer or more members, over the members' own connections.

No store is needed. After a failure every survivor calls `reform`. The survivors agree on the next
view (`membership`) and make a new group of its members. A newcomer calls `join` with the secret and
the address of any member; the members admit it when they next call `reform`.
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
from fireflyer.hfreduce.reform.membership import Decided, Membership, View
from fireflyer.hfreduce.reform.membership_driver import MembershipDriver, decode, encode
from fireflyer.hfreduce.rendezvous.connection_listener import GroupEndpoint, discard, open_listener
from fireflyer.hfreduce.rendezvous.establish import Connection, RankSlot, establish
from fireflyer.hfreduce.rendezvous.handshake import Lineage, Purpose
from fireflyer.hfreduce.topology import RankInfo, Topology, interface_address
from fireflyer.rpc.frames import FrameBuffer, frame

GRACE_S = 5.0
"""Default time to wait for a member that is not known to be dead, in seconds."""


def reform(
    old: Connection, timeout_s: float, *, quorum: int | None = None, grace_s: float = GRACE_S
) -> Connection:
    """Makes a new group of the live members of `old` and the waiting newcomers.

    The call is collective among the survivors. They may call it at any time after `old` has failed;
    otherwise all members must call it at the same point of the program. Ranks change: survivors
    keep their order, newcomers follow. Operations of `old` in flight end with an error.

    Args:
        old: connection to replace; this call closes it even on failure.
        timeout_s: limit for this call.
        quorum: number of old members that must agree. Default: more than half, or half with rank 0.
            With a smaller quorum, both parts of a partitioned network may continue.
        grace_s: how long to wait until all members that are not known to be dead call `reform`.

    Raises:
        DeadlineExceeded: too few members took part for a quorum.
        RankFailed: names this rank itself, because the others formed the group without it.
        ConfigError: `old` was closed, or `quorum` is not between 1 and the number of old members.
    """
    deadline = time.monotonic() + timeout_s
    if quorum is not None and not 1 <= quorum <= old.world:
        raise ConfigError(
            f"invalid quorum {quorum}: expected 1 to {old.world}, the number of ranks"
        )
    slot = old.give_up_slot()
    if slot is None:
        raise ConfigError(
            "cannot reform the group: it is closed, or an earlier reform of it failed"
        )
    terms = _Terms(deadline, quorum, grace_s)
    try:
        try:
            old.watch.rethrow()
        except FireflyerError:
            old.group.abort()  # releases operations that still wait
        view = _agree(slot, old.infos, old.epoch + 1, old.watch.failed_ranks, terms)
        old.watch.leave(0.0)
        return _settle(slot, view, old.timeout_s, terms)
    except BaseException:
        old.watch.leave(0.0)
        slot.leave()
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
    """Joins a running group when its members next call `reform`.

    Args:
        addresses: `join_address` values of members; one member that answers is enough.
        secret: the group's secret: FIREFLYER_SECRET, or the members' `slot.lineage.key`.
        timeout_s: limit for this call, and for the operations of the group.
        master: address whose route determines the interface to listen on.
        quorum, grace_s: as for `reform`, if a member dies during the call.

    Raises:
        DeadlineExceeded: the process was not admitted in time.
        PeerLost: none of the addresses answers.
        ProtocolMismatch: a member did not prove the secret, or rejects this process's proof.
        ConfigError: an address is invalid, this process lacks the group's transport, or
            FIREFLYER_HFREDUCE_TRANSPORT names another transport.
    """
    deadline = time.monotonic() + timeout_s
    members = [_parse(address) for address in addresses]
    if len({name for _, name in members}) != 1:
        raise ConfigError("the addresses to join must belong to one group")
    lineage = Lineage(members[0][1], secret)
    listener = open_listener()
    try:
        mine = transport.unsettled(listener.info(interface_address(master)))
        endpoint = GroupEndpoint(listener, lineage.number("join"), -1, secret)
        view = _request_admission(endpoint, [info for info, _ in members], mine, deadline)
        transport.follow([member.info for member in view.members])
        rank = [member.info for member in view.members].index(mine)
        slot = RankSlot.take(listener, lineage, view.epoch, rank, mine)
    except BaseException:
        listener.release()
        raise
    try:
        return _settle(slot, view, timeout_s, _Terms(deadline, quorum, grace_s))
    except BaseException:
        slot.leave()
        raise


@dataclass(frozen=True)
class _Terms:
    deadline: float
    quorum: int | None
    grace_s: float


def _agree(
    slot: RankSlot,
    infos: Sequence[RankInfo],
    epoch: int,
    dead: Callable[[], set[int]],
    terms: _Terms,
    neighbours: Collection[int] = (),
) -> View:
    """Agrees with the other members of the slot's epoch on the next view, and moves to that view.

    Args:
        neighbours: ranks that may still wait for a connection to this rank; a message tells them
            that this rank agrees on another view instead.
    """
    endpoint = slot.endpoint
    quorum = None if terms.quorum is None else min(terms.quorum, len(infos))
    machine = Membership(endpoint.rank, infos, epoch, quorum)
    driver = MembershipDriver(endpoint, machine, dead, slot.join_listener.waiting, terms.grace_s)
    view = driver.agree(terms.deadline, neighbours)
    rank = view.rank_of(endpoint.rank)
    assert rank is not None
    slot.move(epoch, rank)
    slot.join_listener.admit({member.info for member in view.members}, encode(Decided(view)))
    return view


def _settle(slot: RankSlot, view: View, timeout_s: float, terms: _Terms) -> Connection:
    """Connects the view's members; if a member is lost meanwhile, agrees on a new view and
    retries."""
    while True:
        infos = transport.spread([member.info for member in view.members])
        patience = min(terms.deadline, time.monotonic() + 2 * terms.grace_s)
        try:
            return establish(slot, view.epoch, infos, timeout_s, patience)
        except (WireError, CollectiveError) as error:
            if time.monotonic() >= terms.deadline or isinstance(error, ProtocolMismatch):
                raise
            lost = {error.rank} if isinstance(error, RankFailed) else set()
        links = Topology.of(infos).control_links()
        me = slot.endpoint.rank
        neighbours = {a + b - me for a, b in links if me in (a, b)}
        view = _agree(slot, infos, view.epoch + 1, lost.copy, terms, neighbours)


def _parse(address: str) -> tuple[RankInfo, bytes]:
    """Parses a join address; returns an info to dial, and the name of the lineage."""
    where, _, name = address.partition("/")
    host, _, port = where.rpartition(":")
    try:
        return RankInfo("", "", "", host, int(port)), bytes.fromhex(name)
    except ValueError as error:
        raise ConfigError(f"invalid join address {address!r}: expected HOST:PORT/NAME") from error


def _request_admission(
    endpoint: GroupEndpoint, members: Sequence[RankInfo], mine: RankInfo, deadline: float
) -> View:
    """Asks one member after the other for admission; waits for the view that contains `mine`."""
    refused: WireError = PeerLost("no member of the group can be reached")
    for address in members:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            sock = endpoint.dial(-1, address, Purpose.JOIN, left)
        except (PeerLost, DeadlineExceeded) as error:
            refused = error
            continue
        try:
            sock.settimeout(left)
            sock.sendall(frame(msgspec.json.encode(mine)))
            if (view := _await_view(sock, deadline)) is not None:
                return view
            refused = PeerLost(
                f"the member at {address.address}:{address.port} closed the connection"
            )
        except TimeoutError:
            break
        except OSError as error:
            refused = PeerLost(f"the member at {address.address}:{address.port} failed: {error}")
        finally:
            discard(sock)
    if time.monotonic() >= deadline:
        raise DeadlineExceeded("the members of the group did not admit this process in time")
    raise refused


def _await_view(sock: socket.socket, deadline: float) -> View | None:
    """Returns the decided view; None if the connection ends before it arrives."""
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
