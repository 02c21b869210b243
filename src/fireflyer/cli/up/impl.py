"""Implementation of `fireflyer up`."""

import logging
import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import msgspec

from fireflyer import log
from fireflyer.errors import ConfigError
from fireflyer.hai.controller.log_quota import HEAD_BYTES, LIMIT_BYTES
from fireflyer.hai.database.connection import PostgreSQL, parse_url
from fireflyer.hai.engines.inventory import Device
from fireflyer.hai.home import EngineFile, ServerFile, Settings, locate
from fireflyer.hai.server.listeners import Public, parse_public
from fireflyer.hai.server.process import Options
from fireflyer.hai.server.process import serve as serve_home
from fireflyer.hai.server.settings import DEFAULT_NODES, inventory, remember, settle
from fireflyer.units import parse_mib


def choose(home: Path | None, engine: str | None, partition: str | None) -> EngineFile:
    """Returns the engine of the options, otherwise the engine stored in the home.

    Raises:
        ConfigError: the options exclude each other, or the home cannot be used.
        Corrupted: the file in the home cannot be read.
    """
    match engine:
        case "slurm":
            return EngineFile(engine="slurm", partition=partition or "")
        case "local" | None if partition is not None:
            raise ConfigError("--partition requires --engine slurm")
        case "local":
            return EngineFile()
        case None:
            found = locate(home)
            found.create()
            return found.read_engine()
    raise ConfigError(f"invalid --engine {engine!r}: expected local or slurm")


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Options for the database that holds the server's state, and for the public listener."""

    database: str | None
    password_file: Path | None
    listen: str | None
    certificate: Path | None
    key: Path | None
    behind_proxy: bool

    def postgresql(self) -> PostgreSQL | None:
        """Returns the database of the options; None: the home names the database.

        Raises:
            ConfigError: the options exclude each other.
        """
        if self.database is None:
            if self.password_file is not None:
                raise ConfigError("--database-password-file requires --database postgresql://...")
            return None
        parse_url(self.database)
        password = "" if self.password_file is None else os.path.abspath(self.password_file)
        return PostgreSQL(url=self.database, password_file=password)

    def public(self) -> Public | None:
        """Returns the public listener; None: serve only this machine.

        Raises:
            ConfigError: the options exclude each other.
        """
        if self.listen is None:
            if self.certificate is not None or self.key is not None or self.behind_proxy:
                raise ConfigError("--tls-cert, --tls-key and --behind-proxy require --listen")
            return None
        certificate, key = str(self.certificate or ""), str(self.key or "")
        return parse_public(self.listen, certificate, key, behind_proxy=self.behind_proxy)


def limit_mib(text: str | None) -> int | None:
    """Returns the MiB of --log-limit.

    Raises:
        ConfigError: the text is not a size, or the size is too small.
    """
    if text is None:
        return None
    found = parse_mib(text, "--log-limit")
    if found << 20 < 2 * HEAD_BYTES:
        raise ConfigError(
            f"invalid --log-limit {text!r}: expected at least {2 * HEAD_BYTES >> 20}MiB"
        )
    return found


def serve(
    home: Path | None,
    engine: EngineFile,
    where: Where,
    given: Settings,
    keep: bool,
    policy: str | None,
) -> None:
    """Serves in the foreground; prints a line on stderr once the server answers requests. The home
    remembers `given` from then on.

    Raises:
        ConfigError: the engine cannot be used; nodes or GPUs are given for Slurm, which has its own
            nodes; or an option is invalid.
    """
    found = locate(home)
    database, public = where.postgresql(), where.public()
    settings = settle(found, given)
    devices: tuple[Device, ...] = ()
    nodes = DEFAULT_NODES
    if engine.engine == "slurm":
        if given.nodes is not None or given.gpus is not None:
            option = "--nodes" if given.nodes is not None else "--gpus"
            raise ConfigError(f"{option} requires --engine local: Slurm has nodes of its own")
        nodes_text = f"nodes of Slurm, partition {engine.partition or 'by default'}"
    else:
        devices, nodes = inventory(settings)
        nodes_text = f"nodes: {nodes}{_gpus_text(devices)}"
    found.create()
    log.configure(logging.INFO)
    with ExitStack() as starting:
        starting.enter_context(found.starting())

        def stand_by(leader: str) -> None:
            starting.close()
            _say(f"standby: {leader} is the leader of this database; Ctrl-C ends")

        def ready(server: ServerFile) -> None:
            starting.close()
            remember(found, settings)
            also = "" if where.listen is None else f" and at {where.listen}"
            _say(f"serving {found.path} on port {server.port}{also}, {nodes_text}; Ctrl-C ends")
            if elsewhere := os.environ.get("FIREFLYER_SERVER"):
                _say(f"commands here still go to FIREFLYER_SERVER {elsewhere}, not to this server")

        options = Options(
            home=found, engine=engine, nodes=nodes, devices=devices, port=settings.port or 0,
            keep=keep, log_limit=(settings.log_limit_mib or LIMIT_BYTES >> 20) << 20, policy=policy,
            database=database, public=public, stand_by=stand_by,
        )  # fmt: skip
        serve_home(options, ready)


def _gpus_text(devices: tuple[Device, ...]) -> str:
    """Returns for example ", GPUs: 8 a100"."""
    counts = Counter(device.kind or "of unknown type" for device in devices)
    listed = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    return f", GPUs: {listed}" if listed else ""


def _say(text: str) -> None:
    sys.stderr.write(f"fireflyer: {text}\n")
    sys.stderr.flush()
