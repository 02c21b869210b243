"""Implementation of `fireflyer config`: the settings in force, and the source of each."""

import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from fireflyer.cli.printing import as_json
from fireflyer.errors import ConfigError
from fireflyer.fs3.client.connection import TIMEOUT_S
from fireflyer.fs3.client.settings import SECRET, SECRET_FILE, Settings
from fireflyer.fs3.config import FILE, ClusterConfig, NodeConfig, said, settled
from fireflyer.fs3.discovery import VARIABLE
from fireflyer.program import plain

HIDDEN = "(set; not shown)"
DEFAULT = "default"


class Setting(msgspec.Struct):
    """Value of one key of a section."""

    section: str
    key: str
    value: Any
    source: str


def show(where: str | None, *, json: bool) -> None:
    """Prints the settings of a file together with the defaults; without a file, the defaults."""
    settings = list(_all(_file(where)))
    if json:
        as_json(settings)
        return
    wide = max(
        len(f"{one.key} = {_toml(one.value)}") for one in settings if len(str(one.value)) < 40
    )
    section = None
    for one in settings:
        if one.section != section:
            section = one.section
            sys.stdout.write(f"\n[{plain(section)}]\n" if section else "")
        line = f"{one.key} = {_toml(one.value)}"
        sys.stdout.write(f"{plain(line):<{wide}}  # {plain(one.source)}\n")


def _file(where: str | None) -> Path | None:
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


def _all(path: Path | None) -> Iterator[Setting]:
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
        its = named.get(name, {})
        for key in NodeConfig.__struct_fields__:
            value, there = getattr(node, key), key in its
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
        source = "default; Settings of connect()"
        yield Setting("client", field.name, getattr(defaults, field.name), source)
    yield Setting("client", "timeout", TIMEOUT_S, "default; of connect()")
    for name in (VARIABLE, SECRET_FILE):
        yield Setting("environment", name, os.environ.get(name, ""), _set(name))
    yield Setting("environment", SECRET, HIDDEN if SECRET in os.environ else "", _set(SECRET))


def _set(name: str) -> str:
    return "environment" if name in os.environ else "not set"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else msgspec.json.encode(value).decode()
