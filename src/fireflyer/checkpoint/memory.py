"""The memory tier as a rank sees it: replicas of its data in two nodes' keepers, agreed on by all ranks.

docs/checkpoint-tiers.md tells the protocol.
"""

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from fireflyer.checkpoint import tierwire as wire
from fireflyer.checkpoint.keeperlink import (
    KeeperLink,
    connect_local,
    local_probe,
    remote_probe,
)
from fireflyer.checkpoint.manifest import Generation
from fireflyer.checkpoint.memfd import Memory
from fireflyer.checkpoint.replica import Opening, ReplicaStorage, Source
from fireflyer.checkpoint.silence import Probe
from fireflyer.checkpoint.tiers import Complete, Inventory, Stamp, buddies, newest_complete
from fireflyer.errors import DeadlineExceeded, FireflyerError, PeerLost, WireError
from fireflyer.hfreduce.topology import boot_id, host_key, interface_address
from fireflyer.log import get_logger

_log = get_logger("checkpoint")

LINGER_S = 600.0
PLACE_DEADLINE_S = 120.0
START_S = 60.0
"""How long a keeper may take to start."""
_DATA_SHARE, _COMMIT_SHARE = 0.8, 0.9
"""Of the time for a save in memory: by when all data is in place, and by when it is committed. The rest is
for telling that it is not."""


class Control(Protocol):
    """The manager's own control group."""

    def blobs(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Collective."""
        ...


class _Arrival(msgspec.Struct, frozen=True):
    """What a rank says of itself before it joins its keeper."""

    node: str
    machine: str
    key: bytes
    """Rank 0's: of the job. In the control group's messages only, never in arguments, files or logs."""


class _Seat(msgspec.Struct, frozen=True):
    """Where a rank's keeper is, and what it holds; or why there is none."""

    address: str = ""
    port: int = 0
    inventory: Inventory = Inventory()
    error: str = ""


T = TypeVar("T")


class _Lines:
    """Connections to the nodes' keepers, made when first wanted. A keeper that did not answer is not asked
    again."""

    def __init__(
        self, seats: Sequence[_Seat], key: bytes, node: int, own: KeeperLink, stall_s: float
    ) -> None:
        """`own`: to the keeper of `node`, this one. It is not made again: a keeper that was lost is empty."""
        self.end = math.inf
        """When the time for what goes on is over."""
        self.silent: set[int] = set()
        self._stall_s = stall_s
        self._seats = seats
        self._key = key
        self._node = node
        self._links = {node: own}
        self._stopped = False

    def stop(self) -> None:
        """From another thread: whoever waits for a keeper is told that it is gone, now and from now on."""
        self._stopped = True
        for link in list(self._links.values()):
            link.interrupt()

    def to(self, node: int) -> KeeperLink:
        """
        Raises:
            PeerLost, DeadlineExceeded, ProtocolMismatch: if it cannot be reached.
        """
        link = self._links.get(node)
        if link is not None and link.silent:
            self.silent.add(node)
        if node in self.silent:
            raise PeerLost(f"the keeper of node {node} does not answer")
        if link is None or link.closed:
            if node == self._node:
                raise PeerLost("this node's keeper is gone")
            link = self._links[node] = self._connect(node)
        if self._stopped:  # looked at once the link can be seen by `stop`
            raise PeerLost("the save was abandoned: the members of the job have changed")
        link.end = self.end
        return link

    def _connect(self, node: int) -> KeeperLink:
        seat = self._seats[node]
        try:
            return KeeperLink.remote(
                seat.address, seat.port, self._key, stall_s=self._stall_s, end=self.end
            )
        except DeadlineExceeded:
            self.silent.add(node)
            raise

    def fell_silent(self) -> set[int]:
        """The nodes whose keepers did not answer."""
        return self.silent | {node for node, link in self._links.items() if link.silent}

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class MemoryTier:
    """Replicas of this job's saves in the memory of its nodes.

    The constructor, `join` and `newest` are collective; all else is local. For one thread at a time; `open`ed
    saves are independent of it. Nothing but `open` raises for want of memory or of a keeper: the tier
    is then skipped, with one warning by rank 0, and the storage tier goes on alone.
    """

    def __init__(
        self,
        control: Control,
        rank: int,
        world: int,
        place: str,
        *,
        epoch: int = 0,
        limit_bytes: int | None = None,
        linger_s: float = LINGER_S,
        deadline_s: float = PLACE_DEADLINE_S,
        start_s: float = START_S,
    ) -> None:
        """
        Args:
            place: what tells this manager's saves from those of others: its storage's name, the same
                for all attempts.
            epoch: the run's, if it has claimed one; older runs are shut out then.
            limit_bytes: what this node's keeper may hold of this place; None: half of its share of the
                memory available at the join, and of what it holds already.
            linger_s: how long a keeper outside the platform stays without a connection.
            deadline_s: how long this rank waits for keepers and other ranks, in one save (from when its data
                is copied), in a `join` or for one answer to a load.
            start_s: the same for a join in which this node's keeper may be starting.
        """
        self._control = control
        self._rank = rank
        self._world = world
        self._place = place
        self._epoch = epoch
        self._limit_bytes = limit_bytes
        self._share = 1
        """Nodes of the job on this machine."""
        self._linger_s = linger_s
        self._deadline_s = deadline_s
        self._start_s = start_s
        self._lines: _Lines | None = None
        self._silent: dict[str, Probe] = {}
        """By node: keepers that did not answer, and have not since."""
        self._joined = False
        """Whether all ranks have come through the last `join`; else nothing is replicated."""
        self._key = b""
        self._seats: list[_Seat] = []
        self._nodes: list[str] = []
        self._ranks_node: list[int] = []
        self._warned = False
        self.healthy = False
        """Whether all that this rank did since the last `join` went well. Where any rank's is False, `join`
        again on all of them: a keeper that was lost is replaced by a new, empty one."""
        self.found: Complete | None = None
        """The newest complete save that the nodes held at the last `join`."""
        self.join()

    # -- coming together ---------------------------------------------------------------------------

    def join(self, epoch: int = 0) -> None:
        """Connects to this node's keeper, starting it if need be; agrees on what is complete. Collective.

        Args:
            epoch: the run's, if it has claimed one since the last time.
        """
        self.close()
        self._joined = False
        self._epoch = epoch or self._epoch
        mine = _Arrival(host_key(boot_id()), boot_id(), b"")
        if self._rank == 0:
            mine = msgspec.structs.replace(mine, key=secrets.token_bytes(32))
        arrivals = self._exchange(mine, _Arrival)
        self._key = arrivals[0].key
        names = [arrival.node for arrival in arrivals]
        self._nodes = list(dict.fromkeys(names))
        self._ranks_node = [self._nodes.index(name) for name in names]
        machine = [a.node for a in arrivals if a.machine == mine.machine]
        self._share = len(set(machine))
        for name in [name for name in self._silent if name not in self._nodes]:
            self._silent.pop(name).close()
        own, seat = self._take_seat()
        seats = self._exchange(seat, _Seat)
        self._seats = [seats[self._ranks_node.index(node)] for node in range(len(self._nodes))]
        if own is not None:
            self._lines = _Lines(self._seats, self._key, self._node, own, self._deadline_s)
        self.found = None
        errors = [f"rank {rank}: {seat.error}" for rank, seat in enumerate(seats) if seat.error]
        if not errors:
            found = newest_complete([seat.inventory for seat in self._seats])
            with self._within(self._deadline_s):
                settled = self._settle(found)
            errors = [error for error in self._exchange(settled, str) if error]
            self.found = found if not errors else None
        self.healthy = self._joined = not errors
        if errors:
            self._warn(errors[0])

    def _take_seat(self) -> tuple[KeeperLink | None, _Seat]:
        for name in [name for name, probe in self._silent.items() if probe.answered()]:
            self._silent.pop(name).close()
        if self._silent:
            names = ", ".join(sorted(self._silent))
            return None, _Seat(error=f"the keeper of {names} does not answer")
        try:
            link, address, port, inventory = self._join_own(max(self._deadline_s, self._start_s))
        except FireflyerError as error:
            if isinstance(error, DeadlineExceeded):
                self._ask_later(
                    self._nodes[self._node], local_probe(self._place, self._nodes[self._node])
                )
            return None, _Seat(error=f"{type(error).__name__}: {error}")
        return link, _Seat(address, port, inventory)

    def _ask_later(self, name: str, probe: Probe) -> None:
        if name not in self._silent:
            self._silent[name] = probe
            probe.answered()  # asks

    def _join_own(self, patience_s: float) -> tuple[KeeperLink, str, int, Inventory]:
        address = interface_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        join = wire.Join(
            version=wire.VERSION,
            place=self._place,
            epoch=self._epoch,
            limit_bytes=self._limit_bytes or 0,
            key=self._key,
            address=address,
            share=self._share,
            stall_s=self._deadline_s,
        )
        sock = connect_local(self._place, self._nodes[self._node], self._linger_s)
        link, port, inventory = KeeperLink.local(sock, join, patience_s)
        return link, address, port, inventory

    def _settle(self, found: Complete | None) -> str:
        """The first rank of each node brings its keeper to what all agree on; why it could not, or ""."""
        if self._ranks_node.index(self._node) != self._rank:
            return ""
        try:
            if found is None:
                self._link(self._node).tell(wire.Settle(None, 0))
            else:
                manifest = self._link(self._nearest(found)).manifest(found.stamp)
                self._link(self._node).tell(wire.Settle(found.stamp, len(found.holders)), manifest)
        except FireflyerError as error:
            return f"node {self._nodes[self._node]}: {error}"
        return ""

    def abandon(self) -> None:
        """From another thread than `replicate`'s: the save under way is given up at once. `join` before
        anything else."""
        if self._lines is not None:
            self._lines.stop()

    def close(self) -> None:
        """Lets go of the keepers; they keep what they hold."""
        if self._lines is not None:
            self._remember_silent(self._lines)
            self._lines.close()
        self._lines = None

    def _remember_silent(self, lines: _Lines) -> None:
        for node in lines.fell_silent():
            name, seat = self._nodes[node], self._seats[node]
            if node == self._node:
                self._ask_later(name, local_probe(self._place, name))
            else:
                self._ask_later(name, remote_probe(seat.address, seat.port, self._key))

    @contextlib.contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """No keeper is waited for longer than so, all together. Whose keeper did not answer is asked at the
        end whether it does, so that the next `join` need not wait."""
        lines = self._lines
        if lines is None:
            yield
            return
        lines.end = time.monotonic() + seconds
        try:
            yield
        finally:
            lines.end = math.inf
            self._remember_silent(lines)

    # -- saving ------------------------------------------------------------------------------------

    def replicate(
        self,
        generation: Generation,
        data: Iterable[bytes | memoryview],
        describe: Callable[[], tuple[bytes, Sequence[wire.Block]]],
        merge: Callable[[list[bytes]], bytes],
    ) -> bool:
        """This rank's share of one save, from its background thread; whether the save is committed in memory.

        Args:
            data: the content of this rank's data file; each chunk is copied before the next one is asked for.
            describe: called when all chunks were taken: the rank's part of the manifest, as bytes; and
                CRC32s over the content, ascending.
            merge: on rank 0: all parts, by rank, to the manifest. It looks at the claims first:
                what it raises fails the save in memory, and only there.
        """
        if not self._joined:
            return False
        with self._within(self._deadline_s):
            return self._replicate(generation, data, describe, merge)

    def _replicate(
        self,
        generation: Generation,
        data: Iterable[bytes | memoryview],
        describe: Callable[[], tuple[bytes, Sequence[wire.Block]]],
        merge: Callable[[list[bytes]], bytes],
    ) -> bool:
        try:
            start = self._put(generation, data, describe)
            stamp, world = _stamp(generation), self._world
            if self._rank != 0:
                left_s = self._left_s(start, _COMMIT_SHARE)
                self._link(self._node).await_commit(stamp, left_s)
                return True
            left_s = self._left_s(start, _DATA_SHARE)
            manifest = merge(self._link(self._node).gather(stamp, world, left_s))
        except FireflyerError as error:
            self._note(generation, error)
            if self._rank == 0:
                self.discard(generation)
            return False
        try:
            for node in range(len(self._nodes)):
                self._link(node).tell(wire.Commit(stamp, world), manifest)
        except FireflyerError as error:
            # Who has the mark has let go of the save before, so this one stays: `join` tells the others.
            self._note(generation, error)
            self.healthy = False
            return False
        return True

    def give_up(self, generation: Generation, reason: str) -> None:
        """This rank has nothing to `replicate` of a save in which the others take part."""
        if not self._joined:
            return
        with self._within(self._deadline_s):
            try:
                lost = wire.Place(_stamp(generation), self._world, self._rank, reason)
                self._link(self._ranks_node[0]).tell(lost)
            except FireflyerError as error:
                self._note(generation, error)
            if self._rank == 0:
                self.discard(generation)

    def fence(self, epoch: int) -> None:
        """The run has claimed its epoch; this node's keeper refuses older runs from now on."""
        self._epoch = epoch
        if not self._joined:
            return  # the next join tells
        try:
            with self._within(self._deadline_s):
                self._link(self._node).tell(wire.Fence(epoch))
        except FireflyerError as error:
            self.healthy = False
            self._warn(str(error))

    def _put(
        self,
        generation: Generation,
        data: Iterable[bytes | memoryview],
        describe: Callable[[], tuple[bytes, Sequence[wire.Block]]],
    ) -> float:
        """Returns when, by time.monotonic, the time for the save began: once the data was copied, for which
        storage would have waited, too."""
        stamp, rank, world = _stamp(generation), self._rank, self._world
        error, part = "", b""
        start = time.monotonic()
        try:
            try:
                memory = Memory.filled(data)
                part, blocks = describe()
            finally:
                start = time.monotonic()
                self._end_at(start + _DATA_SHARE * self._deadline_s)
            self._link(self._node).put(stamp, world, rank, memory, blocks)
            if (buddy := buddies(len(self._nodes))[self._node]) is not None:
                self._link(buddy).put(stamp, world, rank, memory, blocks)
        except FireflyerError as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            self._end_at(start + self._deadline_s)
            self._link(self._ranks_node[0]).tell(wire.Place(stamp, world, rank, error), part)
        return start

    def _end_at(self, end: float) -> None:
        if self._lines is not None:
            self._lines.end = end

    def _left_s(self, start: float, share: float) -> float:
        return max(0.0, start + share * self._deadline_s - time.monotonic())

    def _note(self, generation: Generation, error: FireflyerError) -> None:
        self.healthy = self.healthy and not isinstance(error, WireError)
        _log.debug("step %d in memory: %s", generation.step, error)
        self._warn(f"step {generation.step}: {error}")

    def discard(self, generation: Generation) -> None:
        """Has all keepers let go of a save, as far as they can be reached."""
        for node in range(len(self._nodes)):
            try:
                self._link(node).tell(wire.Abort(_stamp(generation)))
            except FireflyerError as error:
                self.healthy = False
                _log.debug("the keeper of %s: %s", self._nodes[node], error)

    # -- loading -----------------------------------------------------------------------------------

    def newest(self) -> Complete | None:
        """The newest complete save in memory now. Collective."""
        try:
            with self._within(self._deadline_s):
                held = self._link(self._node).look()
        except FireflyerError as error:
            self.healthy = False
            _log.debug("this node's keeper: %s", error)
            held = Inventory()
        inventories = self._exchange(held, Inventory)
        return newest_complete(
            [inventories[self._ranks_node.index(node)] for node in range(len(self._nodes))]
        )

    def open(self, complete: Complete) -> ReplicaStorage:
        """What `found` or `newest` gave, in the shape of the storage that it would lie in.

        Raises:
            StorageError, WireError: if its manifest cannot be had any more.
        """
        stamp = complete.stamp
        generation = Generation(stamp.epoch, stamp.number, stamp.step)
        own = self._join_own(self._deadline_s)[0]
        lines = _Lines(self._seats, self._key, self._node, own, self._deadline_s)
        data: dict[str, list[Opening]] = {}
        for rank, nodes in enumerate(complete.holders):
            nearest = sorted(nodes, key=lambda node: node != self._node)
            data[generation.data(rank)] = [
                self._opening(lines, node, stamp, rank) for node in nearest
            ]
        try:
            manifest = lines.to(self._nearest(complete)).manifest(stamp)
        except FireflyerError:
            lines.close()
            raise
        name = f"memory:{self._place}"
        return ReplicaStorage(name, (generation.manifest, manifest), data, lines.close)

    def _opening(self, lines: _Lines, node: int, stamp: Stamp, rank: int) -> Opening:
        return lambda: Source(lines.to(node), stamp, rank)

    def _nearest(self, complete: Complete) -> int:
        """A node with the manifest."""
        return self._node if self._node in complete.marked else complete.marked[0]

    # -- connections -------------------------------------------------------------------------------

    @property
    def _node(self) -> int:
        return self._ranks_node[self._rank]

    def _link(self, node: int) -> KeeperLink:
        if self._lines is None:
            raise PeerLost("there is no keeper on this node")
        return self._lines.to(node)

    def _exchange(self, mine: T, kind: type[T]) -> list[T]:
        gathered = self._control.blobs(msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(one, type=kind) for one in gathered]

    def _warn(self, reason: str) -> None:
        if self._rank == 0 and not self._warned:
            self._warned = True
            _log.warning("checkpoints in memory are skipped, storage goes on: %s", reason)


def _stamp(generation: Generation) -> Stamp:
    return Stamp(generation.epoch, generation.number, generation.step)
