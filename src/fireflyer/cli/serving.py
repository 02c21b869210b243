"""`fireflyer up`."""

import logging
import sys
from contextlib import ExitStack
from pathlib import Path

from fireflyer import log
from fireflyer.errors import ConfigError
from fireflyer.hai.home import EngineFile, ServerFile, locate
from fireflyer.hai.server import DEFAULT_NODES, Options
from fireflyer.hai.server import serve as serve_home


def choose(home: Path | None, engine: str | None, partition: str | None) -> EngineFile:
    """What was asked for, else what the home remembers.

    Raises:
        ConfigError: the options do not go together, or the home cannot be used.
        Corrupted: what the home remembers cannot be read.
    """
    match engine:
        case "slurm":
            return EngineFile(engine="slurm", partition=partition or "")
        case "local" | None if partition is not None:
            raise ConfigError("--partition is for --engine slurm")
        case "local":
            return EngineFile()
        case None:
            found = locate(home)
            found.create()
            return found.read_engine()
    raise ConfigError(f"--engine must be local or slurm, not {engine!r}")


def serve(
    home: Path | None,
    engine: EngineFile,
    nodes: int | None,
    port: int,
    keep: bool,
    policy: str | None,
) -> None:
    """Serves in the foreground; says so on stderr once requests are answered.

    Raises:
        ConfigError: the engine cannot be used, or has nodes of its own; or there is no such policy.
    """
    if engine.engine == "slurm":
        if nodes is not None:
            raise ConfigError("--nodes is for --engine local: Slurm has its own")
        nodes_text = f"nodes of Slurm, partition {engine.partition or 'by default'}"
    else:
        nodes_text = f"nodes: {nodes or DEFAULT_NODES}"
    options = Options(
        home=locate(home), engine=engine, nodes=nodes or DEFAULT_NODES, port=port, keep=keep,
        policy=policy,
    )  # fmt: skip
    where = options.home
    where.create()
    log.configure(logging.INFO)
    with ExitStack() as starting:
        starting.enter_context(where.starting())

        def ready(server: ServerFile) -> None:
            starting.close()
            sys.stderr.write(
                f"fireflyer: serving {where.path} on port {server.port}, {nodes_text}; Ctrl-C ends\n"
            )
            sys.stderr.flush()

        serve_home(options, ready)
