"""Settings of a file system: those of its cluster.toml, values derived from them, and those of its
clients."""

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from fireflyer.cli.config.settings import DEFAULT, Setting
from fireflyer.errors import ConfigError
from fireflyer.fs3.client.connection import TIMEOUT_S
from fireflyer.fs3.client.discovery import VARIABLE
from fireflyer.fs3.client.settings import Settings
from fireflyer.fs3.config import FILE, ClusterConfig, NodeConfig, said, settled


def cluster_file(where: str | None) -> Path | None:
    """Returns the cluster.toml that `where` or FIREFLYER_FS names, or None if they name no file.

    Raises:
        ConfigError: the file that `where` names does not exist.
    """
    named = where or os.environ.get(VARIABLE)
    if not named:
        return None
    path = Path(named)
    if path.is_dir():
        path /= FILE
    if not path.is_file():
        if where is None:
            return None  # FIREFLYER_FS holds an address
        raise ConfigError(f"{path} does not exist")
    return path


def file_system_settings(path: Path | None) -> Iterator[Setting]:
    """Yields the settings of a cluster.toml; without a file, the defaults.

    Raises:
        ConfigError: a setting is invalid.
    """
    table = said(path) if path else {}
    try:
        config = msgspec.convert(table, ClusterConfig)
        config = settled(config, path.resolve().parent if path else Path.cwd())
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from None
    source = str(path)

    def row(section: str, key: str, value: Any, there: bool) -> Setting:
        return Setting(section, key, value, source if there else DEFAULT)

    for key in ClusterConfig.__struct_fields__:
        if key != "nodes":
            yield row("", key, getattr(config, key), key in table)
    times = config.times
    for key in ("lease_s", "heartbeat_s", "dead_s"):
        yield Setting("derived", key, round(getattr(times, key), 6), "from failover_s")
    named = table.get("nodes", {})
    for name, node in config.nodes.items():
        given = named.get(name, {})
        for key in NodeConfig.__struct_fields__:
            value, there = getattr(node, key), key in given
            if key == "directory" and not there:
                yield Setting(f"nodes.{name}", key, value, "default: NAME beside the file")
            elif key == "metrics" and not value:
                yield Setting(f"nodes.{name}", key, config.metrics, "as the cluster's")
            else:
                yield row(f"nodes.{name}", key, value, there)
    yield from _client()


def _client() -> Iterator[Setting]:
    """Yields the settings of client programs, which the file does not contain."""
    defaults = Settings()
    for field in fields(Settings):
        value = getattr(defaults, field.name)
        if value is not None:  # None: an optional callback, which no file can hold
            yield Setting("client", field.name, value, "default; Settings of connect()")
    yield Setting("client", "timeout", TIMEOUT_S, "default; of connect()")
