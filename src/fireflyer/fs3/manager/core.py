"""State machine of a primary manager: no I/O, no clock, no threads.

All values of `now` are seconds of one monotonic clock. A decision that changes entries of the
records is a `Change`. The caller makes the change's rows durable in a transaction that fails if
another primary has taken over. Then the caller calls `saved`, and publishes the change. At most one
change is being saved at a time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from fireflyer.errors import ConfigError, NotPrimary, Stale, Unavailable
from fireflyer.fs3.manager.chains import (
    Chain,
    Local,
    Public,
    dismissed,
    needs_answer_of,
    next_chain,
    restart_from,
)
from fireflyer.fs3.manager.leases import Times
from fireflyer.fs3.manager.placement import place
from fireflyer.fs3.manager.routing import SLOTS, Entry, Node, Records, Routing, Table, key_of
from fireflyer.rpc.address import Address


class TargetVitals(msgspec.Struct, array_like=True):
    """Contents of a target, and events since it was opened.

    Attributes:
        busy_chunks: number of chunks with operations in flight.
        checked, damaged: numbers of chunks whose CRCs were checked, and that failed the check.
        scrubbed: time of the last complete scrub, in s since 1970; 0: never.
        unrepaired: number of damaged chunks that are not repaired yet.
        scrub: newest request (`Routing.scrub`) whose scrub is complete.
    """

    chunks: int
    bytes: int
    busy_chunks: int
    checked: int
    damaged: int
    scrubbed: int
    unrepaired: int = 0
    scrub: int = 0


class Vitals(msgspec.Struct, array_like=True):
    """Condition of a node, for display; no decision depends on it.

    Attributes:
        version: version of the node's software.
        disk_bytes, free_bytes: size and free space of the disk of the node's targets.
        metrics: URL of the node's metrics.
        faults: targets that are closed or faulty, and why.
        kept_bytes: bytes of the disk that writes must leave free.
        refuses: True if a write of a whole chunk would use these bytes.
    """

    version: str
    disk_bytes: int
    free_bytes: int
    metrics: str
    targets: dict[int, TargetVitals]
    faults: dict[int, str]
    kept_bytes: int = 0
    refuses: bool = False


class Beat(msgspec.Struct, array_like=True):
    """Heartbeat of a node.

    Attributes:
        session: number that `register` gave to the node's process.
        number: grows within the session.
        locals: reports of the node's targets.
        routing: version of the routing that the node has.
        vitals: condition of the node; only some heartbeats carry vitals.
        cluster: number of the file system that issued the session; "": not sent.
        question: newest question (see `Core.question`) that the node has received.
    """

    node: int
    session: int
    number: int
    locals: dict[int, Local]
    routing: int = 0
    vitals: Vitals | None = None
    cluster: str = ""
    question: int = 0


class Registered(msgspec.Struct, array_like=True):
    """Answer to the registration of a node's process.

    Attributes:
        session: number of the process, and first incarnation of the node's targets.
        cluster: number of the file system, see `admission`.
    """

    node: int
    session: int
    lease_s: float
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """Entries to save, then to publish."""

    version: int
    entries: tuple[Entry, ...]
    rows: dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class _Process:
    """State of a node's newest process at its newest heartbeat."""

    session: int
    number: int
    heard_at: float
    locals: dict[int, Local]
    question: int


class Core:
    """State of a primary during one term."""

    def __init__(self, records: Records, epoch: int, times: Times, now: float) -> None:
        self.records = records
        self.times = times
        self._epoch = epoch
        self._begun = 0  # number of incarnations issued in this term
        self._processes: dict[int, _Process] = {}
        self.vitals: dict[int, Vitals] = {}
        """Newest vitals of each node."""
        self._started = now
        self._ticked = now
        self._detect_after = now
        # By chain: question sent when members were first missed.
        self._questions: dict[int, int] = {}
        self.question = 0
        """Newest question: a number that nodes repeat in their heartbeats; 0: none in this term.

        A heartbeat with this number proves that its node was alive after the question was sent. The
        caller must send a new question to all nodes immediately.
        """
        self._asked_at = float("-inf")
        self._stopped_since: dict[int, float] = {}  # by chain: time since which no target serves
        # Entries that operators and nodes requested, and that are not in a change yet.
        self._requested: dict[bytes, Entry] = {}
        self._asked: dict[bytes, Entry] = {}  # requested entries in the change being saved
        self._saving: Change | None = None
        self._alive: list[int] = []
        self.dirty = True
        """True if a report since the last tick may change a chain."""

    # Nodes

    def incarnation(self) -> int:
        """Returns a number that no term has issued before, for a target whose store was reopened."""
        self._begun += 1
        return self._epoch << 32 | self._begun

    def rival(self, name: str, identity: str, now: float) -> float | None:
        """Finds a process with another folder that may still run under that node's name.

        Returns:
            Time of the process's newest heartbeat; -inf: no heartbeat in this term yet. None: there
            is no such process.
        """
        node = next((node for node in self._all_nodes() if node.name == name), None)
        if node is None or not identity or node.identity in ("", identity):
            return None
        process = self._processes.get(node.id)
        since = process.heard_at if process else self._started
        if now - since > self.times.dead_s:
            return None
        return process.heard_at if process else float("-inf")

    def register(
        self, name: str, address: str, slots: int, local: str = "", identity: str = ""
    ) -> Registered:
        """Registers a starting node process; the answer may be sent once `settled` is true.

        The previous process may still run. The first heartbeat of the new process replaces the
        previous process; by then the new process holds the locks of its targets. REQUIRES: `rival`
        returns None.

        Raises:
            ConfigError: the address or the number of targets is invalid.
        """
        if not 1 <= slots <= SLOTS:
            raise ConfigError(
                f"invalid number of targets {slots} of node {name}: expected 1 to {SLOTS}"
            )
        Address.parse(address)
        known = {node.name: node for node in self._all_nodes()}
        old = known.get(name)
        number = old.id if old else 1 + max((node.id for node in known.values()), default=0)
        if old and old.slots > slots:
            raise ConfigError(
                f"node {name} had {old.slots} targets and now has {slots}: restore the missing ones"
            )
        node = Node(number, name, address, slots, local, identity)
        if node != old:
            self._request(node)
        return Registered(number, self.incarnation(), self.times.lease_s)

    def heartbeat(self, beat: Beat, now: float) -> Routing:
        """Renews a node's lease; returns the routing changes that the node does not have yet.

        Raises:
            Stale: a later process of the node has registered, or the node is unknown: the sender
                must stop.
            NotPrimary: a later primary issued the session, or no primary did.
            Unavailable: the change being saved removes an active state from the node. A lease
                granted now would outlive that state.
        """
        if beat.session > (self._epoch << 32 | self._begun):
            raise NotPrimary(
                f"unknown session {beat.session}: neither this primary nor an earlier one issued it"
            )
        node = self.records.nodes.get(beat.node)
        if node is None:
            raise Stale(f"unknown node {beat.node}: register it again")
        known = self._processes.get(beat.node)
        if known and beat.session < known.session:
            raise Stale(
                f"a later process of node {node.name} replaced this process, which must stop"
            )
        if known is None or (beat.session, beat.number) > (known.session, known.number):
            locals_ = {t: local for t, local in beat.locals.items() if t in node.targets()}
            if beat.vitals is not None:
                self.vitals[beat.node] = beat.vitals
            fields = (beat.session, beat.number, now, locals_, beat.question)
            self._processes[beat.node] = _Process(*fields)
            self.dirty |= known is None or known.locals != locals_ or bool(self._questions)
        if self._is_leaving(node):
            raise Unavailable(f"node {node.name} is about to lose its place in a chain: retry")
        return msgspec.structs.replace(self.records.after(beat.routing), question=self.question)

    def _is_leaving(self, node: Node) -> bool:
        """Returns whether the change being saved removes an active state from a target of the node."""
        if self._saving is None:
            return False
        chains = self.records.chains
        pairs = [(chains.get(c.id), c) for c in self._saving.entries if isinstance(c, Chain)]
        return any(dismissed(old, new) & {*node.targets()} for old, new in pairs if old)

    def last_heartbeat(self, node: int) -> tuple[float, dict[int, Local]] | None:
        """Returns time and target reports of a node's newest heartbeat; None: none in this term."""
        process = self._processes.get(node)
        return (process.heard_at, process.locals) if process else None

    def alive(self, now: float) -> list[int]:
        """Returns the nodes whose leases may still run."""
        return [
            number
            for number, process in self._processes.items()
            if now - process.heard_at <= self.times.dead_s
        ]

    # Chains

    def tick(self, now: float) -> Change | None:
        """Returns the next change to save, if one is due and none is being saved."""
        if now - self._ticked > self.times.heartbeat_s:
            # The event loop was delayed, so heartbeats may be unread: detect expired leases later.
            self._detect_after = now + self.times.heartbeat_s
        self._ticked = now
        if self._saving:
            return None
        entries = dict(self._requested)
        self._asked, self._requested = self._requested, {}
        if now >= self._detect_after:
            for after in self._evaluate(now):
                entries.setdefault(key_of(after), after)
        if not entries:
            return None
        version = self.records.version + 1
        changed = tuple(entries.values())
        self._saving = Change(version, changed, self.records.rows(changed, version))
        return self._saving

    def saved(self) -> Routing:
        """Applies the change that is now durable; returns the routing to publish."""
        assert self._saving
        change, self._saving = self._saving, None
        self.dirty = True
        return self.records.apply(change.entries, change.version)

    def defer(self) -> None:
        """Drops the change being saved, which the caller could not store.

        Requested entries stay pending. New versions of chains are dropped, because the nodes that
        were silent may have sent heartbeats since.
        """
        assert self._saving
        self._saving = None
        self._requested = self._asked | self._requested
        self.dirty = True

    @property
    def settled(self) -> bool:
        """True if no requested entry remains to be saved."""
        return self._saving is None and not self._requested

    def _evaluate(self, now: float) -> list[Chain]:
        """Evaluates the chains if an input may have changed; returns the chains that change."""
        fresh = now - self._started <= self.times.dead_s
        alive = self.alive(now)
        if alive == self._alive and not (
            self.dirty or fresh or self._questions or self._stopped_since
        ):
            return []
        self._alive, self.dirty = alive, fresh
        locals_ = {t: local for n in alive for t, local in self._processes[n].locals.items()}
        pairs = [(c, self._evaluated(c, locals_, now)) for c in self.records.chains.values()]
        return [after for chain, after in pairs if after is not chain]

    def _evaluated(self, chain: Chain, locals_: dict[int, Local], now: float) -> Chain:
        if chain.targets(Public.SERVING):
            self._stopped_since.pop(chain.id, None)
            waited = 0.0
        else:
            waited = now - self._stopped_since.setdefault(chain.id, now)
        if now - self._started <= self.times.dead_s and self._awaits_heartbeat(chain):
            return chain  # nodes without a heartbeat in this term may have earlier leases
        if not self._has_answer(chain, locals_, now):
            return chain
        return next_chain(chain, locals_, waited >= self.times.recovery_wait_s)

    def _has_answer(self, chain: Chain, locals_: dict[int, Local], now: float) -> bool:
        """Returns whether a staying target answered the question sent when members were first
        missed.

        A later heartbeat alone proves nothing: it may have been in flight since before its node
        died.
        """
        staying = needs_answer_of(chain, locals_)
        if not staying:
            self._questions.pop(chain.id, None)
            return True
        if chain.id not in self._questions:
            if self._asked_at != now:  # one question for all chains of an evaluation
                self._asked_at = now
                self.question = max(self.question, self._epoch << 32) + 1
            self._questions[chain.id] = self.question
        asked = self._questions[chain.id]
        return any(self._processes[target // SLOTS].question >= asked for target in staying)

    def _awaits_heartbeat(self, chain: Chain) -> bool:
        return any(target // SLOTS not in self._processes for target in chain.targets())

    # Operators

    def lay_out(
        self, table: int, replicas: int, *, one_node: bool = False, seed: int = 0, version: int = 0
    ) -> Table:
        """Makes chains of all free targets, and a version of the table that includes them.

        Args:
            one_node: True if replicas may be in different targets of one node.
            version: version of the table to make; 0: the next. An existing version is returned
                unchanged.

        Raises:
            ConfigError: there are too few nodes, no target is free, or `version` is not next.
        """
        versions = [known for known in self._all_tables() if known.id == table]
        last = max(versions, key=lambda known: known.version, default=Table(table, 0, ()))
        if version:
            if last.version == version:
                return last
            if last.version != version - 1:
                raise ConfigError(
                    f"table {table} has version {last.version}; {version} is not next"
                )
        taken = {t for chain in self._all_chains() for t in chain.targets()}
        free = [[t for t in node.targets() if t not in taken] for node in self._all_nodes()]
        if one_node:
            free = [[target] for targets in free for target in targets]
        free = [targets for targets in free if targets]
        if len(free) < replicas or replicas < 1:
            where = "free targets" if one_node else "nodes with free targets"
            raise ConfigError(f"{replicas} replicas need as many {where}; there are {len(free)}")
        placed = place(len(free), min(map(len, free)), replicas, seed)
        first = 1 + max((chain.id for chain in self._all_chains()), default=0)
        chains = [
            Chain.new(first + at, [free[node][slot] for node, slot in slots])
            for at, slots in enumerate(placed.slots())
        ]
        made = Table(table, last.version + 1, last.chains + tuple(chain.id for chain in chains))
        for chain in chains:
            self._request(chain)
        self._request(made)
        return made

    def restart_chain(self, chain: int, target: int) -> Chain:
        """Restarts a chain from `target`; drops data that only the lost last serving targets had.

        Raises:
            ConfigError: there is no such chain or member, or the chain serves.
        """
        current = next((known for known in self._all_chains() if known.id == chain), None)
        if current is None:
            raise ConfigError(f"there is no chain {chain}")
        try:
            after = restart_from(current, target)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._request(after)
        return after

    def _request(self, entry: Entry) -> None:
        self._requested[key_of(entry)] = entry

    def _pending(self) -> list[Entry]:
        saving = self._saving.entries if self._saving else ()
        return [*saving, *self._requested.values()]

    def _all_nodes(self) -> list[Node]:
        """Returns all nodes, saved or pending; the next two methods do so for chains and tables."""
        later = {e.id: e for e in self._pending() if isinstance(e, Node)}
        return list((self.records.nodes | later).values())

    def _all_chains(self) -> list[Chain]:
        later = {e.id: e for e in self._pending() if isinstance(e, Chain)}
        return list((self.records.chains | later).values())

    def _all_tables(self) -> Iterable[Table]:
        later = {(e.id, e.version): e for e in self._pending() if isinstance(e, Table)}
        return (self.records.tables | later).values()
