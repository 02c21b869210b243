"""Process of a file system with one or more roles. See docs/guide/fs3.md, "Use"."""

import contextlib
import os
import socket
import threading
from collections.abc import Collection
from pathlib import Path

from prometheus_client import CollectorRegistry

from fireflyer.errors import ConfigError, NoSpace, WireError
from fireflyer.fs3.cleanup import Cleanup
from fireflyer.fs3.config import ClusterConfig
from fireflyer.fs3.control import Control
from fireflyer.fs3.exporter import Check, Exporter, PortTaken
from fireflyer.fs3.roles import Role
from fireflyer.fs3.storage.metrics import StorageCollector
from fireflyer.fs3.storage.node import NodeSettings, StorageNode
from fireflyer.log import speaker
from fireflyer.rpc.address import Address
from fireflyer.rpc.proof import Secret

ALL = frozenset({Role.MANAGER, Role.META, Role.STORAGE})
DAY_S = 24 * 3600.0


class Process:
    """Roles that run from the constructor to `close`; a context manager.

    Attributes:
        manager: address of the manager.
        nodes: the storage nodes by name, if storage is among the roles.
        metrics: URL of the metrics of this process; "" if it serves none.
    """

    def __init__(
        self,
        config: ClusterConfig,
        roles: Collection[Role],
        names: Collection[str],
        *,
        standby: bool = False,
    ) -> None:
        """Starts the roles; waits without a limit for a manager in another process.

        Args:
            names: names of the storage nodes.
            standby: the manager waits until the process that has opened the metadata ends.

        Raises:
            ConfigError: the configuration, or a path or address in it, cannot be used; or the roles
            cannot be combined.
            Unavailable: another process has opened the metadata.
            Stale: another process has the name of this node.
        """
        _check(roles, standby)
        self._secret = secret = config.secret
        self._control: Control | None = None
        self.nodes: dict[str, StorageNode] = {}
        self._ended = threading.Event()
        with contextlib.ExitStack() as started:
            exporter = _start_exporter(config, names if Role.STORAGE in roles else ())
            self.metrics = exporter.url if exporter else ""
            if exporter:
                started.callback(exporter.close)

            def show(role: str, registry: CollectorRegistry, check: Check) -> None:
                if exporter:
                    exporter.add(role, registry, check)
                    # Runs before the role's close.
                    started.callback(exporter.remove, role, registry)

            self.manager = config.manager
            if Role.MANAGER in roles:
                self._control = control = Control(config, secret, self.metrics, standby=standby)
                started.callback(control.close)
                show("manager", control.manager.metrics.registry, control.manager.trouble)
                show("meta", control.operations.registry, control.trouble)
                self.manager = control.address
            if Role.STORAGE in roles:
                for name in names:
                    node = _start_node(
                        config, name, self.manager, secret, self._ended, self.metrics
                    )
                    started.callback(node.close)
                    show(f"storage {name}", StorageCollector(node).registry, node.trouble)
                    self.nodes[name] = node
            self._end = started.pop_all()

    def set_up(self) -> None:
        """Waits until the file system can be used, if this process is its manager."""
        if self._control:
            self._control.set_up()
            control, secret = self._control, self._secret
            sweep = Cleanup(control.execute, self.manager, secret, control.session_ns)
            # Runs before the close of the chains that the sweep queries.
            self._end.callback(sweep.close)

    def wait(self) -> None:
        """Waits until a storage node stops because of an error, possibly forever.

        Raises:
            Stale: another process has replaced the node.
            ConfigError: the manager belongs to another file system.
        """
        self._ended.wait()
        raise next(node.why_ended for node in self.nodes.values() if node.why_ended)

    def close(self) -> None:
        self._end.close()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check(roles: Collection[Role], standby: bool) -> None:
    if not roles or not ALL.issuperset(roles):
        raise ConfigError("invalid roles: expected one or more of manager, meta and storage")
    if (Role.MANAGER in roles) != (Role.META in roles):
        raise ConfigError("manager and meta share one store: run both in one process")
    if standby and (Role.MANAGER not in roles or Role.STORAGE in roles):
        raise ConfigError("a standby has the roles manager and meta, and no others")


def _start_exporter(config: ClusterConfig, names: Collection[str]) -> Exporter | None:
    """Starts the exporter at the node's address for metrics, or else at the cluster's.

    A standby and several nodes of one machine share the cluster's setting, so the port may be
    taken. The exporter then uses another port.
    """
    addresses = (config.node(name).metrics for name in names)
    address = next(filter(None, addresses), config.metrics)
    if not address:
        return None
    token, unguarded = config.metrics_token, config.metrics_open
    try:
        return Exporter(address, token, unguarded=unguarded)
    except PortTaken as error:
        made = Exporter(str(Address(Address.parse(address).host)), token, unguarded=unguarded)
        speaker("fs3", "metrics").warning(
            "%s: the metrics of this process are at %s; set `metrics` in [nodes.NAME] for another address",
            error,
            made.url,
        )
        return made


def _start_node(
    cluster: ClusterConfig,
    name: str,
    manager: str,
    secret: Secret,
    ended: threading.Event,
    metrics: str,
) -> StorageNode:
    config = cluster.node(name)
    settings = NodeSettings(
        directory=Path(config.directory),
        name=name,
        listen=config.address,
        advertise=config.advertise,
        targets=config.targets,
        workers=config.workers,
        buffers=config.buffer_mib << 20,
        reserve=config.reserve_mib << 20,
        chunk=cluster.chunk_kib << 10,
        scrub_s=config.scrub_days * DAY_S,
        metrics=metrics,
    )
    try:
        settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{settings.directory} cannot hold chunks: {error.strerror}"
        raise ConfigError(reason) from None
    _clear_socket(config.address)
    while True:
        try:
            return StorageNode(settings, manager, secret, ended)
        except (WireError, NoSpace) as error:
            if not error.retryable:
                raise
            speaker("fs3", "storage", name).warning("waiting for the manager: %s", error)


def _clear_socket(address: str) -> None:
    """Removes the socket of a killed process; keeps a socket that has a listener."""
    path = Address.parse(address).path
    if not path or not os.path.exists(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise ConfigError(f"{address} cannot be used: {error.strerror}") from None
