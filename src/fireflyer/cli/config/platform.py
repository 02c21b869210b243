"""Settings of the platform, environment variables, and the files that hold settings."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fireflyer.cli.config.settings import DEFAULT, HIDDEN, Setting
from fireflyer.fs3.client.discovery import VARIABLE
from fireflyer.fs3.client.settings import SECRET, SECRET_FILE
from fireflyer.hai.controller.log_quota import LIMIT_BYTES
from fireflyer.hai.faults.rules import NAME as FAULTS
from fireflyer.hai.home import Home
from fireflyer.hai.scheduling.policies import DEFAULT as DEFAULT_POLICY
from fireflyer.hai.server.settings import DEFAULT_NODES, read_settings
from fireflyer.hai.validation.settings import NAME as VALIDATOR

ENVIRONMENT = (
    VARIABLE, SECRET_FILE, SECRET,
    "FIREFLYER_HOME", "FIREFLYER_SERVER", "FIREFLYER_TOKEN_FILE", "FIREFLYER_CA_FILE",
    "FIREFLYER_IFNAME", "FIREFLYER_ZONE", "FIREFLYER_ISA", "FIREFLYER_FLIGHT_DIR",
    "FIREFLYER_HFREDUCE_TABLE", "FIREFLYER_HFREDUCE_TRANSPORT", "FIREFLYER_HFREDUCE_CPUS",
    "FIREFLYER_HFREDUCE_SPIN", "FIREFLYER_CUDART", "FIREFLYER_CUDA",
)  # fmt: skip
"""Environment variables that users may set."""


class File(msgspec.Struct):
    """File that may hold settings, and need not exist."""

    path: str
    exists: bool
    content: str


def platform_settings(home: Home) -> Iterator[Setting]:
    """Yields the settings that a server with this home (the platform's folder) uses."""
    remembered, engine = read_settings(home), home.read_engine()
    section, source = "platform", str(home.settings)
    named = "environment" if os.environ.get("FIREFLYER_HOME") == str(home.path) else DEFAULT
    yield Setting(section, "home", str(home.path), named)
    stored = str(home.engine) if home.engine.exists() else DEFAULT
    yield Setting(section, "engine", engine.engine, stored)
    yield Setting(section, "partition", engine.partition, stored)
    policy = home.read_policy()
    where = DEFAULT if policy is None else str(home.policy)
    yield Setting(section, "policy", policy or DEFAULT_POLICY, where)
    defaults = {"nodes": DEFAULT_NODES, "gpus": "driver", "port": "any free",
                "log_limit_mib": LIMIT_BYTES >> 20}  # fmt: skip
    for key, value in msgspec.structs.asdict(remembered).items():
        there = value is not None
        yield Setting(section, key, value if there else defaults[key], source if there else DEFAULT)


def environment() -> Iterator[Setting]:
    """Yields the environment variables that users may set; the value of a secret is hidden."""
    for name in ENVIRONMENT:
        value = os.environ.get(name)
        shown = HIDDEN if name == SECRET and value is not None else value or ""
        yield Setting("environment", name, shown, "not set" if value is None else "environment")


def files(home: Home, cluster: Path | None) -> Iterator[File]:
    """Yields the files that hold settings; `cluster`: the file system's cluster.toml."""
    for path, content in (
        (home.settings, "options of the last `fireflyer up`"),
        (home.engine, "engine of the tasks"),
        (home.policy, "scheduling policy"),
        (home.database_file, "location of the platform's PostgreSQL"),
        (home.path / FAULTS, "rules for faults"),
        (home.path / VALIDATOR, "validation of nodes"),
        (cluster, "the file system"),
    ):
        if path is not None:
            yield File(str(path), path.exists(), content)
