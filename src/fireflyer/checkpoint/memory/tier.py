"""Memory tier from a rank's view: replicas in two nodes' keepers, agreed on by all ranks.

docs/internals/checkpoint-tiers.md describes the protocol.
"""

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from fireflyer.checkpoint.directory.manifest import Generation
from fireflyer.checkpoint.memory import messages as wire
from fireflyer.checkpoint.memory.inventory import (
    Complete,
    Inventory,
    Stamp,
    buddies,
    newest_complete,
)
from fireflyer.checkpoint.memory.keeper_link import (
    KeeperLink,
    connect_local,
    local_probe,
    remote_probe,
)
from fireflyer.checkpoint.memory.keeper_probe import KeeperProbe
from fireflyer.checkpoint.memory.memfd import Memory
from fireflyer.checkpoint.memory.replica import Opening, ReplicaStorage, Source
from fireflyer.errors import DeadlineExceeded, FireflyerError, PeerLost, WireError
from fireflyer.hfreduce.topology import boot_id, host_key, interface_address
from fireflyer.log import get_logger

_log = get_logger("checkpoint")

LINGER_S = 600.0
PLACE_DEADLINE_S = 120.0
START_S = 60.0
"""Maximum number of seconds that a keeper may take to start."""
_DATA_SHARE, _COMMIT_SHARE = 0.8, 0.9
"""Deadlines for all data and for the commit, as shares of the time for a save in memory. The rest
of the time is for reporting a failure."""


class ControlGroup(Protocol):
    """The manager's own control group."""

    def blobs(self, mine: bytes) -> list[bytes]:
        """Returns every rank's bytes, by rank. Collective."""
        ...


class _JoinRequest(msgspec.Struct, frozen=True):
    """Message of a rank to all ranks, before the rank joins its keeper."""

    node: str
    """Key that is equal for all ranks of one node; see `host_key`."""
    machine: str
    """Boot id of the machine, which may run several nodes in containers."""
    key: bytes
    """Key of the job, from rank 0. It appears only in the control group's messages, never in
    arguments, files or logs."""


class _KeeperState(msgspec.Struct, frozen=True):
    """Address and inventory of a rank's keeper, or the reason why there is no keeper."""

    address: str = ""
    port: int = 0
    inventory: Inventory = Inventory()
    error: str = ""


T = TypeVar("T")


class _KeeperConnections:
    """Connections to the nodes' keepers, opened on first use. An unresponsive keeper gets no
    further requests."""

    def __init__(
        self, states: Sequence[_KeeperState], key: bytes, node: int, own: KeeperLink, stall_s: float
    ) -> None:
        """`own` is the link to the keeper of `node`, this node. It is not reopened, because after a
        loss the node's next keeper is empty."""
        self.end = math.inf
        """Deadline of the operation in progress, by time.monotonic."""
        self.unresponsive: set[int] = set()
        self._stall_s = stall_s
        self._states = states
        self._key = key
        self._node = node
        self._links = {node: own}
        self._stopped = False

    def stop(self) -> None:
        """Ends all current and later waits for keepers with PeerLost. Called from another
        thread."""
        self._stopped = True
        for link in list(self._links.values()):
            link.interrupt()

    def to(self, node: int) -> KeeperLink:
        """Returns the link to a node's keeper; connects if needed.

        Raises:
            PeerLost, DeadlineExceeded, ProtocolMismatch: if the keeper cannot be reached.
        """
        link = self._links.get(node)
        if link is not None and link.unresponsive:
            self.unresponsive.add(node)
        if node in self.unresponsive:
            raise PeerLost(f"the keeper of node {node} does not answer")
        if link is None or link.closed:
            if node == self._node:
                raise PeerLost("this node's keeper is gone")
            link = self._links[node] = self._connect(node)
        if self._stopped:  # checked after the link is in `_links`, where `stop` finds it
            raise PeerLost("the save was abandoned: the members of the job have changed")
        link.end = self.end
        return link

    def _connect(self, node: int) -> KeeperLink:
        state = self._states[node]
        try:
            return KeeperLink.remote(
                state.address, state.port, self._key, stall_s=self._stall_s, end=self.end
            )
        except DeadlineExceeded:
            self.unresponsive.add(node)
            raise

    def all_unresponsive(self) -> set[int]:
        """Returns the nodes whose keepers did not answer."""
        return self.unresponsive | {node for node, link in self._links.items() if link.unresponsive}

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class MemoryTier:
    """Replicas of this job's saves in the memory of its nodes.

    The constructor, `join` and `newest` are collective; all other methods are local. Use the object
    from one thread at a time; storages from `open` are independent of the object. Only `open`
    raises if memory or a keeper is missing. If another method finds this, rank 0 logs one warning,
    and saves go to storage alone.
    """

    def __init__(
        self,
        control: ControlGroup,
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
            place: name that separates this manager's saves from other managers' saves. It begins
                with the name of the manager's storage, and is equal for all attempts.
            epoch: the run's epoch, or 0 if the run has claimed none. This node's keeper rejects
                runs with a lower epoch.
            limit_bytes: maximum number of bytes that this node's keeper may hold of this place.
                None: half of the sum of the bytes already held and the node's share of the memory
                available at the join.
            linger_s: seconds that a keeper continues without a connection, unless the platform
                started it.
            deadline_s: maximum number of seconds that this rank waits for keepers and other ranks:
                in one save (counted from the end of its copy), in a `join`, or for one answer to a
                load.
            start_s: lower bound, in seconds, of the timeout of a join's wait for this node's
                keeper, because the keeper may still be starting.
        """
        self._control = control
        self._rank = rank
        self._world = world
        self._place = place
        self._epoch = epoch
        self._limit_bytes = limit_bytes
        self._share = 1
        """Number of the job's nodes on this machine."""
        self._linger_s = linger_s
        self._deadline_s = deadline_s
        self._start_s = start_s
        self._lines: _KeeperConnections | None = None
        self._unresponsive: dict[str, KeeperProbe] = {}
        """Probes of the keepers that did not answer and have not recovered, by node."""
        self._joined = False
        """True if all ranks completed the last `join`; otherwise nothing is replicated."""
        self._key = b""
        self._states: list[_KeeperState] = []
        self._nodes: list[str] = []
        self._ranks_node: list[int] = []
        self._warned = False
        self.healthy = False
        """False after a failure that only another `join` can repair, such as the loss of a keeper.
        If it is False on any rank, call `join` on all ranks. A new, empty keeper then replaces a
        lost keeper."""
        self.found: Complete | None = None
        """Newest complete save that the nodes held at the last `join`."""
        self.join()

    # -- joining -----------------------------------------------------------------------------------

    def join(self, epoch: int = 0) -> None:
        """Connects to this node's keeper or starts one; agrees on the complete save. Collective.

        Args:
            epoch: the run's epoch, if the run has claimed one since the last join.
        """
        self.close()
        self._joined = False
        self._epoch = epoch or self._epoch
        mine = _JoinRequest(host_key(boot_id()), boot_id(), b"")
        if self._rank == 0:
            mine = msgspec.structs.replace(mine, key=secrets.token_bytes(32))
        arrivals = self._exchange(mine, _JoinRequest)
        self._key = arrivals[0].key
        names = [arrival.node for arrival in arrivals]
        self._nodes = list(dict.fromkeys(names))
        self._ranks_node = [self._nodes.index(name) for name in names]
        machine = [a.node for a in arrivals if a.machine == mine.machine]
        self._share = len(set(machine))
        for name in [name for name in self._unresponsive if name not in self._nodes]:
            self._unresponsive.pop(name).close()
        own, state = self._take_state()
        states = self._exchange(state, _KeeperState)
        self._states = [states[self._ranks_node.index(node)] for node in range(len(self._nodes))]
        if own is not None:
            self._lines = _KeeperConnections(
                self._states, self._key, self._node, own, self._deadline_s
            )
        self.found = None
        errors = [f"rank {rank}: {state.error}" for rank, state in enumerate(states) if state.error]
        if not errors:
            found = newest_complete([state.inventory for state in self._states])
            with self._within(self._deadline_s):
                settled = self._settle(found)
            errors = [error for error in self._exchange(settled, str) if error]
            self.found = found if not errors else None
        self.healthy = self._joined = not errors
        if errors:
            self._warn(errors[0])

    def _take_state(self) -> tuple[KeeperLink | None, _KeeperState]:
        for name in [name for name, probe in self._unresponsive.items() if probe.answered()]:
            self._unresponsive.pop(name).close()
        if self._unresponsive:
            names = ", ".join(sorted(self._unresponsive))
            return None, _KeeperState(error=f"the keeper of {names} does not answer")
        try:
            link, address, port, inventory = self._join_own(max(self._deadline_s, self._start_s))
        except FireflyerError as error:
            if isinstance(error, DeadlineExceeded):
                self._ask_later(
                    self._nodes[self._node], local_probe(self._place, self._nodes[self._node])
                )
            return None, _KeeperState(error=f"{type(error).__name__}: {error}")
        return link, _KeeperState(address, port, inventory)

    def _ask_later(self, name: str, probe: KeeperProbe) -> None:
        if name not in self._unresponsive:
            self._unresponsive[name] = probe
            probe.answered()  # sends the question

    def _join_own(self, wait_s: float) -> tuple[KeeperLink, str, int, Inventory]:
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
        link, port, inventory = KeeperLink.local(sock, join, wait_s)
        return link, address, port, inventory

    def _settle(self, found: Complete | None) -> str:
        """Tells this node's keeper the agreed save, if this is the node's first rank.

        Returns an error message, or "".
        """
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
        """Fails a `replicate` in another thread at once. Afterwards, call `join` before any other
        method."""
        if self._lines is not None:
            self._lines.stop()

    def close(self) -> None:
        """Closes the links to the keepers, which keep their replicas."""
        if self._lines is not None:
            self._probe_unresponsive(self._lines)
            self._lines.close()
        self._lines = None

    def _probe_unresponsive(self, lines: _KeeperConnections) -> None:
        for node in lines.all_unresponsive():
            name, state = self._nodes[node], self._states[node]
            if node == self._node:
                self._ask_later(name, local_probe(self._place, name))
            else:
                self._ask_later(name, remote_probe(state.address, state.port, self._key))

    @contextlib.contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """Limits all waits for keepers inside the block to `seconds` in total.

        At the end, each keeper that did not answer gets a probe, so the next `join` need not wait
        for it.
        """
        lines = self._lines
        if lines is None:
            yield
            return
        lines.end = time.monotonic() + seconds
        try:
            yield
        finally:
            lines.end = math.inf
            self._probe_unresponsive(lines)

    # -- saving ------------------------------------------------------------------------------------

    def replicate(
        self,
        generation: Generation,
        data: Iterable[bytes | memoryview],
        describe: Callable[[], tuple[bytes, Sequence[wire.Block]]],
        merge: Callable[[list[bytes]], bytes],
    ) -> bool:
        """Replicates this rank's share of a save; returns True if memory has committed the save.

        Args:
            data: the content of this rank's data file; each chunk is copied before the next is
                taken.
            describe: called after the last chunk; returns the rank's part of the manifest as bytes,
                and the CRC32 blocks of the content, ascending.
            merge: called on rank 0 to turn all parts, by rank, into the manifest. `merge` first
                checks the claims. If `merge` raises, only the save in memory fails.
        """
        if not self._joined:
            return False
        with self._within(self._deadline_s):
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
            return self._commit(generation, manifest)

    def _commit(self, generation: Generation, manifest: bytes) -> bool:
        """Commits the save on all keepers; returns False if a keeper is lost. Rank 0 only."""
        try:
            for node in range(len(self._nodes)):
                self._link(node).tell(wire.Commit(_stamp(generation), self._world), manifest)
        except FireflyerError as error:
            # A keeper that got the commit has dropped the previous save, so this save stays. The
            # next `join` commits it on the other keepers.
            self._note(generation, error)
            self.healthy = False
            return False
        return True

    def give_up(self, generation: Generation, reason: str) -> None:
        """Reports that this rank has no data for a save in which the other ranks take part."""
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
        """Sets the run's claimed epoch; from now on this node's keeper rejects older runs."""
        self._epoch = epoch
        if not self._joined:
            return  # the next join sends the epoch
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
        """Sends this rank's data to two keepers; returns the start of the save's time budget.

        The budget starts (by time.monotonic) when the copy of the data ends, because a save to
        storage alone would also wait for the copy.
        """
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
        """Discards a save from all reachable keepers."""
        for node in range(len(self._nodes)):
            try:
                self._link(node).tell(wire.Abort(_stamp(generation)))
            except FireflyerError as error:
                self.healthy = False
                _log.debug("the keeper of %s: %s", self._nodes[node], error)

    # -- loading -----------------------------------------------------------------------------------

    def newest(self) -> Complete | None:
        """Returns the newest save that is complete in memory now. Collective."""
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
        """Returns the save of `found` or `newest` as a storage.

        Raises:
            StorageError, WireError: if the save's manifest is no longer available.
        """
        stamp = complete.stamp
        generation = Generation(stamp.epoch, stamp.number, stamp.step)
        own = self._join_own(self._deadline_s)[0]
        lines = _KeeperConnections(self._states, self._key, self._node, own, self._deadline_s)
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

    def _opening(self, lines: _KeeperConnections, node: int, stamp: Stamp, rank: int) -> Opening:
        return lambda: Source(lines.to(node), stamp, rank)

    def _nearest(self, complete: Complete) -> int:
        """Returns a node that has the manifest, preferably this node."""
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
            _log.warning("skipping checkpoints in memory; saves to storage continue: %s", reason)


def _stamp(generation: Generation) -> Stamp:
    return Stamp(generation.epoch, generation.number, generation.step)
