"""Agent of a storage node: registers the node, renews its lease, applies the routing to its targets."""

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from fireflyer import __version__
from fireflyer._native.fs3 import io
from fireflyer.errors import ConfigError, FireflyerError, Stale, StorageError
from fireflyer.fs3.data_connections import Acceptor, dial
from fireflyer.fs3.manager.chains import Local, LocalState
from fireflyer.fs3.manager.core import Registered, TargetVitals, Vitals
from fireflyer.fs3.manager.leases import NodeLease
from fireflyer.fs3.manager.link import ManagerLink
from fireflyer.fs3.manager.routing import SLOTS, Routing
from fireflyer.fs3.roles import Role
from fireflyer.fs3.same_node import advertised, new_socket
from fireflyer.fs3.storage import identity
from fireflyer.fs3.storage.lost import Files, missing_folder_fault, replaced_store_fault
from fireflyer.fs3.storage.scrub import BEGIN, STEP_CHUNKS, ScrubLog, pause_before
from fireflyer.log import speaker
from fireflyer.rpc.proof import Secret

PAUSE_S = 0.2
"""Seconds between attempts to connect to a node, or to reopen a target's store."""
LINES_AT_ONCE = 16
"""Maximum log lines about single chunks per heartbeat; further chunks are counted."""
FOLDERS_EVERY_S = 1.0
"""Seconds between checks that the targets' folders exist."""
FAULTY = (
    "faulty: its store is new, empty or incomplete, its log or index is damaged beyond its copies, "
    "or it differs from the data of its chain; it is filled again while another target serves"
)
Place = tuple[int, int] | None
"""Device and inode of a target's folder; None: the folder or its identity file is missing."""
VITALS_EVERY_S = 1.0
"""Seconds between heartbeats that carry vitals; no chain's state depends on vitals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSettings:
    """Settings of a storage node.

    Attributes:
        directory: folder of the node, with a sub-folder per target.
        name: name of the node; must stay the same at each start.
        listen: address of the data service; port 0: any free port.
        advertise: address at which other machines reach the node, if not `listen`.
        targets: number of its targets.
        workers, buffers: see `io.Node`.
        reserve: bytes of the disk that writes must leave free, for logs and repair.
        chunk: bytes of a usual chunk; the node reports a full disk if less than `reserve` plus one
            chunk is free.
        scrub_s: period in which the scrub checks each chunk once; 0: never.
        metrics: URL of this process's metrics, for display.
    """

    directory: Path
    name: str
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    targets: int = 1
    workers: int = 0
    buffers: int = 256 << 20
    reserve: int = 256 << 20
    chunk: int = 1 << 20
    scrub_s: float = 7 * 24 * 3600.0
    metrics: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("invalid name '': expected the name of a storage node")
        if not 1 <= self.targets <= SLOTS:
            raise ConfigError(f"invalid targets {self.targets}: expected 1 to {SLOTS}")


class StorageNode:
    """Running node, from the constructor to `close`.

    Attributes:
        address: address of its data service.
        number: number that the manager assigned.
        ended: event that is set when the node stops by itself.
        why_ended: reason of that stop: another process replaced the node, or the manager belongs to
            another file system.
    """

    def __init__(
        self,
        settings: NodeSettings,
        managers: str | list[str],
        secret: Secret,
        ended: threading.Event | None = None,
    ) -> None:
        """Starts the node and waits for the manager. `ended` may be shared with other nodes.

        Raises:
            ConfigError: the directory, address or node cannot be used as requested.
            WireError: no manager answers.
        """
        self.settings = settings
        self.ended = ended or threading.Event()
        self.why_ended: FireflyerError | None = None
        self._log = speaker("fs3", "storage", settings.name)
        self._scrubbed = ScrubLog(settings.directory)
        # Newest scrub request that each target has completed.
        self._scrubs_done: dict[int, int] = {}
        # Set by a scrub request and by `close`: ends the pause of the scrub.
        self._scrub_wakeup = threading.Event()
        self._full = False
        self._vitals_sent = 0.0  # time of the last heartbeat with vitals
        self._secret = secret
        self._service = io.Node(settings.workers, settings.buffers)
        self._lock = threading.Lock()  # guards `_ended_service`; an ended service gets no routing
        self._ended_service = False
        self._stopping = threading.Event()
        self._me: Registered | None = None
        self._reopen_at: dict[int, float] = {}  # time of the next attempt to open a target
        self._reconnect_at: dict[int, float] = {}  # time of the next attempt to connect to a node
        self._chains: dict[int, int] = {}  # chain of each open target
        self._faults: dict[int, str] = {}  # faults of closed targets
        self._faulty: dict[int, str] = {}  # faults of open targets
        self._places: dict[int, Place] = {}  # folders of targets that were opened
        self._folders_checked = 0.0  # time of the last check of the folders
        self._files: dict[int, Files] = {}  # files of open targets, in the order of their checks
        self._local_listener = Acceptor(settings.listen, secret, Role.STORAGE, self._service.serve)
        self.address = settings.advertise or str(self._local_listener.address)
        self._local = self._open_local()
        self._link = ManagerLink(managers, secret, Role.STORAGE, on_routing=self._on_routing)
        try:
            self._me = self._register()
        except BaseException:
            self._end()
            raise
        self.number = self._me.node
        self._lease = NodeLease(self._me.lease_s)
        self._threads = [
            threading.Thread(target=self._run_heartbeats, name="fs3-node", daemon=True),
            threading.Thread(target=self._connect_peers, name="fs3-reach", daemon=True),
            threading.Thread(target=self._scrub, name="fs3-scrub", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _register(self) -> Registered:
        """Registers the node, which binds its folder to this file system.

        This happens before a target is made in the folder.
        """
        folder = self.settings.directory
        mine = identity.of_folder(folder)
        self._identity = mine.node
        me = self._register_as(mine, holds=identity.holds_targets(folder))
        if me.cluster != mine.cluster:
            identity.keep(folder, identity.Identity(mine.node, me.cluster))
        return me

    def _register_as(self, mine: identity.Identity, *, holds: bool) -> Registered:
        its = self.settings
        return self._link.register(
            *(its.name, self.address, its.targets, advertised(self._socket)),
            identity=mine.node,
            cluster=mine.cluster,
            holds=holds,
        )

    def close(self) -> None:
        """Stops the node; the manager detects the stop when the lease expires."""
        self._stopping.set()
        self._scrub_wakeup.set()
        for thread in self._threads:
            thread.join()
        self._scrubbed.save()
        self._end()

    def statistics(self) -> dict[str, int]:
        """Returns the counters of the service; see `io.Node.statistics`."""
        return self._service.statistics()

    def timings(self) -> dict[str, tuple[list[int], int]]:
        """Returns the durations of requests; see `io.Node.timings`."""
        return self._service.timings()

    def targets(self) -> dict[int, dict[str, float]]:
        """Returns the values of `io.Node.targets` for each open target, with additional keys.

        The keys are `chain`, `role` (the Public state in the chain), `local` (the LocalState that
        the target reports), `scrubbed` (time of the last complete scrub, s since 1970; 0: never)
        and `scrub` (number of the newest scrub request that the target has completed).
        """
        found: dict[int, dict[str, float]] = {}
        counts = self._service.targets()
        for target, _, local, _, _, _, role, _ in self._service.reports():
            chain = self._chains.get(target)
            if chain is not None and target in counts:
                scrubbed = self._scrubbed.place(target % SLOTS).finished
                more = {"chain": chain, "role": role, "local": local, "scrubbed": scrubbed}
                more["scrub"] = self._scrubs_done.get(target, 0)
                found[target] = {**counts[target], **more}
        return found

    def space(self) -> tuple[int, int]:
        """Returns the disk's bytes and its free bytes; zeros if the disk cannot be queried."""
        try:
            disk = os.statvfs(self.settings.directory)
        except OSError:
            return 0, 0
        return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize

    @property
    def refuses(self) -> bool:
        """True if the disk is too full for a write of a whole chunk."""
        size, free = self.space()
        return size > 0 and free < self.settings.reserve + self.settings.chunk

    @property
    def lease_ends(self) -> float:
        """End of the lease on the monotonic clock."""
        return self._lease.ends

    def trouble(self) -> str:
        """Returns the fault of this node; "" if there is none."""
        if self.why_ended:
            return str(self.why_ended)
        if not self._lease.runs(time.monotonic()):
            return "its lease has expired: it cannot reach the manager"
        return "; ".join(f"target {target}: {why}" for target, why in self.faults.items())

    @property
    def faults(self) -> dict[int, str]:
        """Targets that are closed or faulty, and why."""
        return {**self._faulty, **self._faults}

    def _end(self) -> None:
        self._local_listener.close()
        if self._local:
            self._local.close()
            with contextlib.suppress(OSError):
                os.unlink(self._socket)
        self._link.close()
        with self._lock:
            self._ended_service = True
            self._service.stop()

    def _open_local(self) -> Acceptor | None:
        """Opens the listener for clients on this machine.

        Returns None if the data service itself uses a Unix socket, or if the path is too long for a
        socket.
        """
        self._socket = ""
        if self._local_listener.address.path:
            return None
        path = new_socket(self.settings.directory)
        if not path:
            self._log.warning(
                "node %s: the path of %s is too long for a socket: clients of this machine use TCP",
                self.settings.name,
                self.settings.directory,
            )
            return None
        acceptor = Acceptor(f"unix:{path}", self._secret, Role.STORAGE, self._service.serve)
        self._socket = path
        return acceptor

    # Lease

    def _run_heartbeats(self) -> None:
        assert self._me is not None
        due, answered = 0.0, 0
        while not self._stopping.is_set():
            now = time.monotonic()
            woken = self._service.wait(max(0.001, min(due - now, 0.05)))
            opened = self._open_targets()
            asked = self._link.question > answered
            if not (woken or opened or asked or time.monotonic() >= due):
                continue
            answered, scrub = self._link.question, self._link.scrub_asked
            due = time.monotonic() + self._me.lease_s / 6
            try:
                now = time.monotonic()
                self._link.heartbeat(self._me, self._lease, now, self._locals(), self._vitals(now))
            except (Stale, ConfigError) as error:
                self._stop(
                    self._registration_error(error) if isinstance(error, ConfigError) else error
                )
                return
            except FireflyerError as error:
                self._log.debug("a heartbeat was not answered: %s", error)
                continue
            self._service.lease(self._lease.ends - time.monotonic(), self._versions())
            if self._link.scrub_asked > scrub:
                self._scrub_wakeup.set()

    def _registration_error(self, error: ConfigError) -> FireflyerError:
        """Registers again, to get the error that a restart of this node would get.

        The manager logs that error, too, with the name of the node.
        """
        assert self._me is not None
        try:
            self._register_as(identity.Identity(self._identity, self._me.cluster), holds=True)
        except FireflyerError as refusal:
            return refusal
        return error

    def _stop(self, why: FireflyerError) -> None:
        self._log.error("node %s stops: %s", self.settings.name, why)
        self.why_ended = why
        self.ended.set()

    def _versions(self) -> list[tuple[int, int]]:
        """Returns the open targets and the versions of their chains.

        No version is older than the version in the manager's last answer.
        """
        chains = {target: self._link.chain(number) for target, number in self._chains.items()}
        return [(target, chain.version) for target, chain in chains.items() if chain]

    def _locals(self) -> dict[int, Local]:
        return {
            target: Local(incarnation, LocalState(state), version, number)
            for target, incarnation, state, version, number, _, _, _ in self._service.reports()
        }

    def _vitals(self, now: float) -> Vitals | None:
        """Returns the vitals if they are due, else None."""
        if now < self._vitals_sent + VITALS_EVERY_S:
            return None
        self._vitals_sent = now
        self._log_damage()
        size, free = self.space()
        targets = {
            target: TargetVitals(*(int(its[key]) for key in TargetVitals.__struct_fields__))
            for target, its in self.targets().items()
        }
        self._check_disk(free)
        return Vitals(
            *(__version__, size, free, self.settings.metrics, targets, self.faults),
            kept_bytes=self.settings.reserve,
            refuses=self._full,
        )

    def _check_disk(self, free: int) -> None:
        """Logs a line when the disk fills up, and when it has room again."""
        full, before = self.refuses, self._full
        self._full = full
        if full and not before:
            self._log.error(
                "disk full: writes are refused: free_mib=%d kept_mib=%d directory=%s",
                *(free >> 20, self.settings.reserve >> 20, self.settings.directory),
            )
        elif before and not full:
            self._log.info("the disk has room again: free_mib=%d", free >> 20)

    def _log_damage(self) -> None:
        """Logs a line for each chunk that was found damaged or repaired, up to a limit."""
        found, more = self._service.findings()
        for target, inode, index, damaged in found[:LINES_AT_ONCE]:
            where = (
                f"target={target} chain={self._chains.get(target, 0)} inode={inode} chunk={index}"
            )
            if damaged:
                self._log.error("damage found: %s", where)
            else:
                self._log.info("damage repaired: %s", where)
        more += len(found[LINES_AT_ONCE:])
        if more:
            self._log.warning("damage found or repaired in %d more chunks", more)

    # Routing

    def _on_routing(self, part: Routing) -> None:
        """Handles a part of the routing, on the heartbeat thread or the thread that receives pushes."""
        with self._lock:
            if self._ended_service:
                return
            for node in part.nodes:
                for target in node.targets():
                    self._service.locate(target, node.id)
            for chain in part.chains:
                for target in chain.targets():
                    if target in self._chains:
                        self._apply_chain(target, chain.id)

    def _apply_chain(self, target: int, number: int) -> None:
        """Passes the newest version of a chain to a target.

        The loop repeats if another thread receives a newer version meanwhile.
        """
        applied = 0
        while (chain := self._link.chain(number)) is not None and chain.version > applied:
            members = [(m.target, int(m.state), m.incarnation) for m in chain.members]
            self._service.routing(target, chain.version, members)
            applied = chain.version

    def _open_targets(self) -> bool:
        """Opens targets that joined a chain or whose store failed; returns whether any was opened."""
        assert self._me is not None
        self._check_folders()
        for target, _, local, _, store, _, _, failed in self._service.reports():
            if failed and target in self._chains:
                self._log.warning("target %d: its store failed and is being reopened", target)
                self._close_target(target)
            else:
                self._check_state(target, LocalState(local), store)
        opened = False
        for slot in range(self.settings.targets):
            target = self.number * SLOTS + slot
            if target in self._chains or self._reopen_at.get(target, 0) > time.monotonic():
                continue
            number = self._link.chain_of(target)
            if number is not None:
                opened |= self._open(target, number)
        return opened

    def _close_target(self, target: int) -> None:
        """Closes a target; it is reopened after a pause."""
        self._service.close(target)
        del self._chains[target], self._files[target]
        self._faulty.pop(target, None)
        self._reopen_at[target] = time.monotonic() + PAUSE_S

    def _check_state(self, target: int, local: LocalState, store: int) -> None:
        """Logs when a target becomes faulty and when it is no longer faulty.

        A target is faulty if its state is FAULTY or if its chain last served with another store.
        """
        why = FAULTY if local is LocalState.FAULTY else ""
        chain = self._link.chain(self._chains.get(target, 0))
        if chain and (other := replaced_store_fault(chain, target, store, self._folder(target))):
            why = f"faulty: {other}"
        if why == self._faulty.get(target, ""):
            return
        if why:  # log before `faults` shows the fault
            self._log.error("target %d is %s", target, why)
            self._faulty[target] = why
        else:
            self._log.info("target %d is no longer faulty", target)
            del self._faulty[target]

    def _check_folders(self) -> None:
        """Closes targets whose folders were removed: their data is lost when this process ends.

        This process does not reopen such a target while its folder is missing, because that would
        create an empty folder. After a restart, the node creates an empty folder if
        `missing_folder_fault` allows that.
        """
        if self._folders_checked + FOLDERS_EVERY_S > time.monotonic():
            return
        self._folders_checked = time.monotonic()
        for target, place in self._places.items():
            if target in self._chains and _place(self._folder(target)) != place:
                why = (
                    f"its folder was removed or replaced while it was open: {self._folder(target)}"
                )
                self._close_target(target)
                self._fault(target, why)
        self._check_files()

    def _check_files(self) -> None:
        """Checks the files of one target per call, because targets may have thousands of files.

        A target with missing files continues to serve the data that is left.
        """
        if not self._files:
            return
        target, files = next(iter(self._files.items()))
        self._files[target] = self._files.pop(target)
        if target not in self._faults and (why := files.missing()):
            self._fault(target, why)

    def _fault(self, target: int, why: str) -> None:
        if self._faults.get(target) != why:
            self._log.error("target %d: %s", target, why)
        self._faults[target] = why

    def _folder(self, target: int) -> Path:
        return self.settings.directory / f"target-{target % SLOTS:03d}"

    def _open(self, target: int, chain: int) -> bool:
        assert self._me is not None
        path = self._folder(target)
        if not path.exists():
            known = self._link.chain(chain)
            why = missing_folder_fault(known, target, path) if known else ""
            if why and target not in self._places:
                self._fault(target, why)
            if why or target in self._places:
                return False
        try:
            fresh = target not in self._reopen_at
            incarnation = self._me.session if fresh else self._link.incarnation()
            self._service.open(os.fspath(path), target, chain, incarnation, self.settings.reserve)
        except (StorageError, ValueError) as error:
            self._fault(target, f"it cannot be opened: {error}")
            self._reopen_at[target] = time.monotonic() + 5 * PAUSE_S
            return False
        self._places[target] = _place(path)
        self._faults.pop(target, None)
        self._chains[target] = chain
        self._files[target] = Files(path)
        self._apply_chain(target, chain)
        return True

    # Other nodes

    def _connect_peers(self) -> None:
        """Connects to nodes for which targets have messages, on a thread apart from the heartbeats."""
        while not self._stopping.wait(0.02):
            for node in self._service.wanted():
                address = self._link.address(node)
                if address is not None and self._reconnect_at.get(node, 0) <= time.monotonic():
                    self._connect(node, address)

    def _connect(self, node: int, address: str) -> None:
        try:
            line = dial(address, self._secret, Role.STORAGE, timeout_s=1.0)
        except FireflyerError as error:
            self._log.debug("cannot reach node %d: %s", node, error)
            self._reconnect_at[node] = time.monotonic() + PAUSE_S
        else:
            self._service.connected(node, line.detach())

    # Scrub

    def _scrub(self) -> None:
        """Scrubs all chunks in rounds: slowly, or immediately on request."""
        while True:
            self._scrub_wakeup.wait(1.0)
            self._scrub_wakeup.clear()  # before the requests are read
            if self._stopping.is_set():
                return
            asked = self._link.scrub_asked
            for target in sorted(self._chains, key=self._last_scrub):
                if asked > self._scrubs_done.get(target, 0):
                    self._scrub_at_once(target, asked)
                elif self.settings.scrub_s > 0 and not self._scrub_slowly(target):
                    break

    def _scrub_slowly(self, target: int) -> bool:
        """Continues a round. Returns False if a request or the node's end interrupted it."""
        after = self._scrubbed.place(target % SLOTS).after
        while not self._scrub_wakeup.wait(self._scrub_pause()):
            if target not in self._chains:
                return True
            after = self._scrub_step(target, after)
            if after == BEGIN:
                return True
        return False

    def _scrub_at_once(self, target: int, asked: int) -> None:
        """Runs a whole round for a request."""
        after = BEGIN
        while target in self._chains and not self._stopping.is_set():
            after = self._scrub_step(target, after)
            if after == BEGIN:
                self._scrubs_done[target] = asked
                return

    def _scrub_step(self, target: int, after: tuple[int, int]) -> tuple[int, int]:
        after = self._service.scrub(target, *after, STEP_CHUNKS)
        self._scrubbed.note(target % SLOTS, after)
        return after

    def _scrub_pause(self) -> float:
        """Returns the pause for the current number of chunks, which changes during a round."""
        chunks = self._service.statistics()["chunks"]
        return pause_before(self.settings.scrub_s, chunks, len(self._chains))

    def _last_scrub(self, target: int) -> float:
        return self._scrubbed.place(target % SLOTS).finished


def _place(folder: Path) -> Place:
    """Returns device and inode of a folder with a store; None: the folder or its `identity` is missing.

    The files themselves are not compared, because snapshots replace the store's files and a rename
    replaces `identity`.
    """
    try:
        os.stat(folder / "identity")
        its = os.stat(folder)
    except OSError:
        return None
    return its.st_dev, its.st_ino
