"""Client of the manager: typed methods, and a copy of the routing that the manager's pushes update."""

import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from fireflyer.errors import DeadlineExceeded, FireflyerError, ProtocolMismatch
from fireflyer.fs3.manager.admission import Registration
from fireflyer.fs3.manager.chains import Chain, Local
from fireflyer.fs3.manager.core import Beat, Registered, Vitals
from fireflyer.fs3.manager.leases import NodeLease
from fireflyer.fs3.manager.routing import Routing, Table, View
from fireflyer.fs3.manager.service import LayOut, Restart, Status
from fireflyer.fs3.roles import NO_MANAGER
from fireflyer.rpc.client import Client
from fireflyer.rpc.handshake import NO_SECRET
from fireflyer.rpc.messages import parse_body
from fireflyer.rpc.policy import Policy
from fireflyer.rpc.proof import Secret

WHERE_SECRET = (
    "name its file by secret_file= or FIREFLYER_FS_SECRET_FILE, or give --dir the folder or cluster.toml "
    "that names it"
)


class ManagerLink:
    """Connection to the primary among `addresses`. Thread-safe. Calls retry as in `Client.call`."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        secret: Secret,
        role: int,
        *,
        policy: Policy | None = None,
        on_routing: Callable[[Routing], None] | None = None,
    ) -> None:
        """Takes the arguments of `Client`. `on_routing` gets each new part of the routing, in order."""
        self._view = View()
        self._lock = threading.RLock()  # reentrant: `on_routing` may ask for chains
        self._on_routing = on_routing
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        self._client = Client(
            *(addresses, secret, role),
            policy=policy,
            pushes={"routing": self._pushed},
            unexpected_roles=NO_MANAGER,
        )

    def register(
        self,
        name: str,
        address: str,
        slots: int,
        local: str = "",
        *,
        identity: str = "",
        cluster: str = "",
        holds: bool = False,
    ) -> Registered:
        """Registers a starting process of the node `name`; see `Registration`.

        Raises:
            ConfigError: the registration is invalid, or the node belongs to another file system or
                runs in another process.
        """
        body = Registration(name, address, slots, local, identity, cluster, holds)
        return self._client.call("register", body, Registered)

    def incarnation(self) -> int:
        """Requests a new incarnation, for a target whose store was reopened."""
        return self._client.call("incarnation", None, int)

    def heartbeat(
        self,
        me: Registered,
        lease: NodeLease,
        now: float,
        locals_: Mapping[int, Local],
        vitals: Vitals | None = None,
    ) -> None:
        """Sends a heartbeat; its answer extends the lease and brings new parts of the routing.

        Between heartbeats the manager pushes changes. Retries end with the lease, which counts from
        `now` for all attempts.

        Raises:
            Stale: this process must stop.
            ConfigError: the manager serves another file system.
            WireError: the manager did not answer.
        """
        number = lease.send(now)
        with self._lock:
            known, question = self._view.version, self._view.question
        fields = (number, dict(locals_), known, vitals, me.cluster, question)
        beat = Beat(me.node, me.session, *fields)
        part = self._client.call("heartbeat", beat, Routing, deadline_s=me.lease_s)
        lease.answered(number)
        self._take(part)

    def refresh(self, deadline_s: float = 30.0) -> None:
        """Fetches the changes since the version of the copy, and subscribes to later changes."""
        self._take(self._client.call("routing", self.version, Routing, deadline_s=deadline_s))

    def reach(self, seconds: float) -> None:
        """Connects to the manager with the first `refresh`, within `seconds`.

        Raises:
            ProtocolMismatch: the manager has another secret or another version.
            DeadlineExceeded: no manager answered; the message has all addresses and the last error.
        """
        try:
            self.refresh(seconds)
        except FireflyerError as error:
            if NO_SECRET in str(error):
                raise ProtocolMismatch(f"{error}; {WHERE_SECRET}") from None
            if not error.retryable:
                raise
            raise DeadlineExceeded(
                f"no manager answered within {seconds:g} s at {', '.join(self._addresses)}: {error}"
            ) from None

    def lay_out(
        self, table: int, replicas: int, *, one_node: bool = False, version: int = 0
    ) -> Table:
        """Makes chains of all free targets, as a new version of the table; see `Core.lay_out`."""
        return self._client.call("lay_out", LayOut(table, replicas, one_node, version), Table)

    def restart_chain(self, chain: int, target: int) -> Chain:
        """Restarts a chain from `target`; see `Core.restart_chain`."""
        return self._client.call("restart_chain", Restart(chain, target), Chain)

    def scrub(self, number: int = 0) -> int:
        """Requests that all nodes read all their chunks and repair damaged ones; does not wait.

        Args:
            number: number of an earlier request, to repeat that request at a new primary; 0: a new
                request.

        Returns:
            Number of the request. A target reports this number (`TargetVitals.scrub`) when its
            scrub is complete.
        """
        return self._client.call("scrub", number, int)

    def status(self) -> Status:
        return self._client.call("status", None, Status)

    @property
    def version(self) -> int:
        """Version of the copy of the routing."""
        with self._lock:
            return self._view.version

    @property
    def scrub_asked(self) -> int:
        """Number of the newest request for a scrub."""
        with self._lock:
            return self._view.scrub

    @property
    def question(self) -> int:
        """Newest question of the manager; the next heartbeat carries it as the answer."""
        with self._lock:
            return self._view.question

    def chain(self, number: int) -> Chain | None:
        with self._lock:
            return self._view.chains.get(number)

    def chain_of(self, target: int) -> int | None:
        """Returns the chain that a target is a member of."""
        with self._lock:
            return next((c.id for c in self._view.chains.values() if target in c.targets()), None)

    def table(self, number: int, version: int) -> Table | None:
        with self._lock:
            return self._view.tables.get((number, version))

    def address(self, node: int) -> str | None:
        """Returns the address of a node's data service."""
        with self._lock:
            known = self._view.nodes.get(node)
            return known.address if known else None

    def close(self) -> None:
        self._client.close()

    def _take(self, part: Routing) -> None:
        with self._lock:
            for taken in self._view.take(part):
                if self._on_routing and (taken.chains or taken.nodes or taken.tables):
                    self._on_routing(taken)

    def _pushed(self, body: msgspec.Raw) -> None:
        """Adds a pushed part of the routing.

        A part that cannot be decoded is dropped: `refresh` or a heartbeat brings its contents.
        """
        try:
            self._take(parse_body(body, Routing))
        except ProtocolMismatch:
            return
