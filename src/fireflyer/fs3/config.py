"""`cluster.toml`: settings that the processes of a file system share, and those of each node."""

import os
import secrets
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.fs3.manager.leases import Times
from fireflyer.fs3.manager.routing import SLOTS
from fireflyer.rpc.address import Address
from fireflyer.rpc.proof import Secret

FILE = "cluster.toml"
SECRET = "secret"
STORE = "meta.sqlite"
"""File of the metadata store, in the folder `metadata`."""
EMBEDDED = "s1"
"""Name of the only node of a file system that `fireflyer fs up --dir` makes."""
SOCKET_PATH_BYTES = 107
ANY_PORT = "127.0.0.1:0"

Level = Literal["debug", "info", "warning", "error"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a storage node: `[nodes.NAME]`. The manager knows the node by NAME."""

    address: str = ANY_PORT
    """Address of the node's data service; port 0: any free port."""
    advertise: str = ""
    """Address at which other machines reach the node, if not `address`."""
    directory: str = ""
    """Folder of the node's targets; default: a folder NAME beside cluster.toml."""
    targets: Annotated[int, msgspec.Meta(ge=1, le=SLOTS)] = 4
    """Number of the node's targets; each is a folder in `directory`, and a member of a different
    chain."""
    workers: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    """Threads of the service; 0: by the number of cores."""
    buffer_mib: Annotated[int, msgspec.Meta(ge=8)] = 256
    """Maximum size of the data in flight in the service, in MiB."""
    reserve_mib: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 256
    """Space in MiB of the node's disk that stays free for logs and repair; a write that needs it
    fails."""
    scrub_days: Annotated[float, msgspec.Meta(ge=0)] = 7.0
    """Days in which the scrub reads and checks each chunk once; 0: never."""
    metrics: str = ""
    """Address of the metrics of this node's process; default: the cluster's `metrics`."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a file system. Paths are relative to the folder of the file."""

    manager: str = "127.0.0.1:4500"
    """Address of the process that is manager and metadata service."""
    secret_file: str = ""
    """File with the secret: mode 0600, at least 16 bytes, the same on all machines.

    Without a secret, the file system serves only this machine.
    """
    metadata: str = "metadata"
    """Folder of the metadata store."""
    replicas: Count = 1
    """Number of replicas of each byte; each is on another node."""
    one_node: bool = False
    """True: if there are too few nodes, replicas may be in different targets of one node."""
    chunk_kib: Annotated[int, msgspec.Meta(ge=4, le=64 << 10)] = 1024
    stripe: Count = 16
    """Maximum number of chains that a file uses."""
    failover_s: Seconds = 4.0
    """Seconds within which the file system fails over from a dead node."""
    recovery_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """Seconds that a stopped chain waits until all targets that served last are alive."""
    session_s: Seconds = 60.0
    """Seconds without a heartbeat after which a client's sessions (files open for writing)
    expire."""
    metrics: str = ANY_PORT
    """Address of `GET /metrics` (Prometheus) and `/healthz`; port 0: any free port; "": none."""
    metrics_token_file: str = ""
    """File (mode 0600) with the bearer token, at least 16 bytes, of clients that read metrics."""
    metrics_open: bool = False
    """True: other machines may read metrics without a token."""
    log: Literal["text", "json"] = "text"
    """Format of the log on standard error; json: one object per line."""
    log_level: Level = "info"
    nodes: dict[str, NodeConfig] = msgspec.field(default_factory=lambda: {"n1": NodeConfig()})

    @property
    def times(self) -> Times:
        lease_s = Times.for_failover(self.failover_s).lease_s
        return Times(lease_s=lease_s, recovery_wait_s=self.recovery_wait_s)

    @property
    def secret(self) -> Secret:
        """Secret of the cluster. Raises ConfigError if its file cannot be used."""
        return Secret.from_file(self.secret_file) if self.secret_file else Secret()

    @property
    def metrics_token(self) -> Secret:
        """Token for metrics. Raises ConfigError if its file cannot be used."""
        return Secret.from_file(self.metrics_token_file) if self.metrics_token_file else Secret()

    def node(self, name: str) -> NodeConfig:
        """Returns a node's settings. Raises ConfigError if there is no such node."""
        found = self.nodes.get(name)
        if found is None:
            known = ", ".join(sorted(self.nodes))
            raise ConfigError(f"unknown node {name!r}: the configuration has {known}")
        return found


def load(path: Path) -> ClusterConfig:
    """Loads the configuration in a file, with all paths made absolute.

    Raises:
        ConfigError: the file cannot be read, or a value is invalid; the message names both.
    """
    table = said(path)
    try:
        config = msgspec.convert(table, ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        return settled(config, path.resolve().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def said(path: Path) -> dict[str, Any]:
    """Reads the file's TOML table without a check of its values. Raises ConfigError as `load`."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not table:
        raise ConfigError(
            f"{path} is empty: restore it. For `fs up --dir`, copy the file of another folder that was "
            "first started with the same --replicas and --targets: it is the same. For a new cluster, "
            "write the file with its nodes, at least [nodes.n1]"
        )
    return table


def settled(config: ClusterConfig, base: Path) -> ClusterConfig:
    """Validates a configuration; resolves paths against `base`. Raises ConfigError."""
    if not config.nodes or any(not name.strip() or "/" in name for name in config.nodes):
        raise ConfigError(
            "invalid nodes: expected at least one [nodes.NAME], with a NAME without slashes"
        )
    if config.chunk_kib & (config.chunk_kib - 1):
        raise ConfigError(f"invalid chunk_kib {config.chunk_kib}: expected a power of two")
    what, count = "nodes", len(config.nodes)
    if config.one_node:
        what, count = "targets", sum(node.targets for node in config.nodes.values())
    if config.replicas > count:
        raise ConfigError(
            f"invalid replicas {config.replicas}: expected at most {count}, the number of {what}"
        )
    return msgspec.structs.replace(
        config,
        manager=_address(config.manager, base),
        metadata=str(base / config.metadata),
        secret_file=str(base / config.secret_file) if config.secret_file else "",
        metrics=_port(config.metrics),
        metrics_token_file=str(base / config.metrics_token_file)
        if config.metrics_token_file
        else "",
        nodes={
            name: msgspec.structs.replace(
                node,
                address=_address(node.address, base),
                advertise=str(Address.parse(node.advertise)) if node.advertise else "",
                directory=str(base / (node.directory or name)),
                metrics=_port(node.metrics),
            )
            for name, node in config.nodes.items()
        },
    )


def _port(text: str) -> str:
    """Validates an address of metrics."""
    address = Address.parse(text) if text else Address()
    if address.path:
        raise ConfigError(f"invalid metrics {address}: expected host:port")
    return str(address) if text else ""


def _address(text: str, base: Path) -> str:
    """Resolves the path of an address.

    A socket path too long for the kernel becomes any free port of the loopback interface.
    """
    address = Address.parse(text)
    if not address.path:
        return str(address)
    path = os.fsencode(base / address.path)
    return f"unix:{os.fsdecode(path)}" if len(path) <= SOCKET_PATH_BYTES else ANY_PORT


def embed(directory: Path, replicas: int | None, targets: int | None) -> ClusterConfig:
    """Loads the configuration of the file system in a directory, or makes one.

    Raises:
        ConfigError: the file system has other numbers of replicas or targets, lost its
            cluster.toml, or cannot be made.
    """
    path = directory / FILE
    if (replicas or 1) * (targets or 4) > SLOTS:
        raise ConfigError(f"a node has at most {SLOTS} targets, for all replicas together")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():
            _reject_lost_store(directory)
        else:
            _reject_orphaned_targets(directory)
        if not (directory / SECRET).exists():
            replace(directory / SECRET, secrets.token_hex(32) + "\n")
        if not path.exists():
            replace(path, _embedded(replicas or 1, targets or 4))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{directory} cannot hold a file system: {reason}") from None
    config = load(path)
    if EMBEDDED not in config.nodes:
        raise ConfigError(
            f"{path} has the nodes {', '.join(sorted(config.nodes))}; start each of them with "
            f"`fireflyer fs up --config {path} --name NODE`"
        )
    each = config.node(EMBEDDED).targets // (config.replicas if config.one_node else 1)
    for name, asked, made in (
        ("replicas", replicas, config.replicas),
        ("targets", targets, each),
    ):
        if asked not in (None, made):
            raise ConfigError(f"the file system in {directory} has {name} = {made}, not {asked}")
    return config


def _reject_orphaned_targets(directory: Path) -> None:
    """Rejects a directory whose targets lost their configuration: new settings would not fit."""
    held = len(list(directory.glob(f"{EMBEDDED}/target-*")))
    if not held and not (directory / STORE).exists():
        return
    count = f"replicas times targets was {held}" if held else "its targets are missing"
    raise ConfigError(
        f"{directory} holds a file system without its {FILE}; {count}. Restore that file, or copy it from "
        "another folder that was first started with the same --replicas and --targets: it is the same. "
        f"To discard the file system, remove {directory}"
    )


def _reject_lost_store(directory: Path) -> None:
    """Rejects a lost metadata store: with an empty store, new files would get old chunks."""
    if (directory / STORE).exists() or not any(directory.glob(f"{EMBEDDED}/target-*")):
        return
    raise ConfigError(
        f"{directory / STORE} is missing: it has the names of the files whose bytes are in "
        f"{directory / EMBEDDED}. Restore it; to discard those files, remove {directory / EMBEDDED}"
    )


def _embedded(replicas: int, targets: int) -> str:
    """Returns the text of cluster.toml: one node that holds all replicas."""
    return f"""\
# A file system in one process: `fireflyer fs up --dir` with this folder.
manager = "unix:manager.sock"
secret_file = "{SECRET}"
metadata = "."
replicas = {replicas}
one_node = true

[nodes.{EMBEDDED}]
address = "unix:{EMBEDDED}.sock"
targets = {replicas * targets}
"""


def replace(path: Path, text: str) -> None:
    """Replaces a small file (0600) atomically, even if the power is cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
