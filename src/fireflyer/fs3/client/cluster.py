"""Client's view of the cluster: the routing, which the manager's pushes update, and connections to
nodes."""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

import numpy as np

from fireflyer._native.fs3.client import ANY_NODE, Engine, FileMap
from fireflyer.errors import FireflyerError, PeerLost, StorageError
from fireflyer.fs3.client.settings import Settings
from fireflyer.fs3.data_connections import dial
from fireflyer.fs3.layout import Layout, chains_of
from fireflyer.fs3.manager.chains import Chain, Public
from fireflyer.fs3.manager.link import ManagerLink
from fireflyer.fs3.manager.routing import SLOTS, Routing
from fireflyer.fs3.roles import Role
from fireflyer.fs3.same_node import reached
from fireflyer.log import get_logger
from fireflyer.rpc.address import Address
from fireflyer.rpc.policy import Policy
from fireflyer.rpc.proof import Secret


class Cluster:
    """Routing and connections of a client. Thread-safe.

    Attributes:
        engine: native engine that reads and writes; the engine gets each pushed routing
            immediately.
    """

    def __init__(
        self,
        client: int,
        managers: str | Sequence[str],
        secret: Secret,
        settings: Settings,
        timeout_s: float = 30.0,
    ) -> None:
        """Connects and waits for a manager.

        Raises:
            DeadlineExceeded: no manager answers before the timeout.
            ProtocolMismatch: the manager has another secret.
        """
        self.damaged_at: set[int] = set()
        self._lock = threading.Lock()  # guards the eight attributes after `_routing_changed`
        self._routing_changed = threading.Condition(self._lock)
        self._version = 0
        self._asking = False
        self._local = ANY_NODE
        self._serving: dict[int, tuple[int, list[int]]] = {}  # by chain: version, nodes that serve
        self._addresses: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._sockets: dict[int, str] = {}  # sockets of nodes on this machine; "" for other nodes
        self._maps: dict[tuple[int, Layout], FileMap] = {}
        self.engine = Engine(
            client,
            _dialler(self._addresses, self._sockets if settings.local else {}, secret),
            settings.lanes,
            settings.senders,
            settings.connect_s,
            settings.local,
        )
        count = 1 if isinstance(managers, str) else max(1, len(managers))
        # Each manager gets one attempt within the timeout.
        policy = Policy(attempt_s=min(settings.attempt_s, timeout_s / count))
        self._link = ManagerLink(
            managers, secret, Role.CLIENT, policy=policy, on_routing=self._on_routing
        )
        try:
            self._link.reach(timeout_s)
        except BaseException:
            self._link.close()
            raise

    @property
    def version(self) -> int:
        """Version of the current routing."""
        with self._lock:
            return self._version

    def wait(self, seen: int, seconds: float, *, ask: bool) -> None:
        """Waits at most `seconds` for a routing that is newer than version `seen`.

        Args:
            ask: True: also request the routing from a manager.
        """
        with self._lock:
            if self._version > seen:
                return
            if ask and not self._asking:
                self._asking = True
                threading.Thread(target=self._ask, name="fs3-routing", daemon=True).start()
            self._routing_changed.wait_for(lambda: self._version > seen, seconds)

    def _ask(self) -> None:
        """Requests the routing; runs in a separate thread, so a silent manager blocks no read."""
        try:
            self._link.refresh()
        except FireflyerError as error:
            get_logger("fs3").debug("could not fetch the routing: %s", error)
        finally:
            with self._lock:
                self._asking = False

    def serving(self, chain: int) -> list[int]:
        """Returns the nodes of the serving targets of a chain, the head's node first."""
        with self._lock:
            return list(self._serving.get(chain, (0, []))[1])

    def file_map(self, inode: int, layout: Layout) -> FileMap:
        """Returns the map from a file's chunks to chains.

        Raises:
            StorageError: the chain table is unknown, or too small for the layout.
            WireError: no manager answers the request for the table.
        """
        with self._lock:
            known = self._maps.get((inode, layout))
        if known:
            return known
        table = self._link.table(layout.table, layout.table_version)
        if table is None:
            self._link.refresh()
            table = self._link.table(layout.table, layout.table_version)
        name = f"chain table {layout.table} version {layout.table_version}"
        if table is None:
            raise StorageError(f"inode {inode} lies on {name}, which the manager does not know")
        try:
            chains = chains_of(layout, table.chains, np.arange(layout.stripe)).tolist()
        except ValueError as error:
            raise StorageError(f"inode {inode} on {name}: {error}") from None
        made = FileMap(inode, layout.chunk_size, chains)
        with self._lock:
            if len(self._maps) >= MAPS_KEPT:
                self._maps.pop(next(iter(self._maps)))
            self._maps[inode, layout] = made
        return made

    def damaged_nodes(self) -> list[str]:
        """Returns the names of the nodes that sent damaged bytes."""
        with self._lock:
            return sorted(self._names.get(node, str(node)) for node in self.damaged_at)

    def close(self) -> None:
        self._link.close()

    def _on_routing(self, part: Routing) -> None:
        with self._lock:
            self._addresses.update((node.id, node.address) for node in part.nodes)
            self._names.update((node.id, node.name) for node in part.nodes)
            self._sockets.update((node.id, reached(node.local)) for node in part.nodes)
            self._serving.update((chain.id, _serving(chain)) for chain in part.chains)
            routes = [(chain, version, nodes) for chain, (version, nodes) in self._serving.items()]
            if part.nodes:
                self._local = _local(self._addresses)
            self.engine.routing(routes, self._local)
            self._version = max(self._version, part.version)
            self._routing_changed.notify_all()


MAPS_KEPT = 4096


def _serving(chain: Chain) -> tuple[int, list[int]]:
    nodes = [m.target // SLOTS for m in chain.members if m.state == Public.SERVING]
    return chain.version, nodes


def _dialler(
    addresses: dict[int, str], sockets: dict[int, str], secret: Secret
) -> Callable[[int, float], int]:
    """Returns the engine's connect callback, which prefers the Unix socket of a node on this
    machine.

    The callback holds no reference to the cluster, which would form a cycle through the engine.
    """

    def connect(node: int, seconds: float) -> int:
        address = addresses.get(node)
        if address is None:
            raise PeerLost(f"the address of node {node} is not known")
        if path := sockets.get(node):
            with contextlib.suppress(PeerLost):
                return dial(path, secret, Role.CLIENT, seconds).detach()
        return dial(address, secret, Role.CLIENT, seconds).detach()

    return connect


def _local(addresses: dict[int, str]) -> int:
    """Returns the node on this machine; ANY_NODE unless exactly one node is here."""
    here = [node for node, address in addresses.items() if _is_this_machine(address)]
    return here[0] if len(here) == 1 else ANY_NODE


def _is_this_machine(text: str) -> bool:
    address = Address.parse(text)
    if address.is_local:
        return True
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address.host, address.port))  # sends nothing
            return bool(probe.getsockname()[0] == probe.getpeername()[0])
    except OSError:
        return False
