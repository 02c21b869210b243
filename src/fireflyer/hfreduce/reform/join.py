"""`init_process_group("hfreduce")` in a process that FIREFLYER_JOIN directs to a running group.

FIREFLYER_JOIN is a list of members' join addresses, separated by commas, or the path of a file with
one address per line.
"""

import os
import re
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from fireflyer.errors import ConfigError

VARIABLE = "FIREFLYER_JOIN"
_ADDRESS = re.compile(r"[^\s,/]+:\d+/[0-9a-f]+")

Rendezvous = Callable[..., Iterator[tuple[Any, int, int]]]


def wanted() -> bool:
    """Returns True if this process is to join a group."""
    return bool(os.environ.get(VARIABLE))


def addresses() -> list[str]:
    """Returns the members' addresses that FIREFLYER_JOIN holds now.

    Raises:
        ConfigError: the named file cannot be read, or holds no address.
    """
    value = os.environ.get(VARIABLE, "").strip()
    parts = value.split(",")
    if all(map(_ADDRESS.fullmatch, parts)):
        return parts
    try:
        with open(value, encoding="utf-8") as file:
            found = file.read().split()
    except OSError as error:
        raise ConfigError(
            f"invalid {VARIABLE} {value!r}: expected HOST:PORT/NAME,... or a file with such "
            f"addresses: {error.strerror}"
        ) from error
    if not found:
        raise ConfigError(f"invalid {VARIABLE} {value!r}: the file holds no addresses")
    return found


def write_members(path: str | os.PathLike[str], addresses: list[str]) -> None:
    """Writes addresses to a file for FIREFLYER_JOIN. Readers see either the old or the new content.

    If the path is a symbolic link, its target is replaced.

    Raises:
        ConfigError: the file cannot be written.
    """
    # A local import, because `import torch` imports this module when it registers the backend.
    from fireflyer.storage.targets import replace_content

    try:
        replace_content(path, "".join(f"{address}\n" for address in addresses).encode())
    except OSError as error:
        raise ConfigError(f"cannot write the join addresses to {path}: {error.strerror}") from error


def install_rendezvous_handler(
    handlers: MutableMapping[str, Rendezvous], no_store: Callable[[], Any]
) -> None:
    """Lets torch's `env://` work without RANK, WORLD_SIZE and a store if this process joins a
    group.

    Args:
        handlers: torch's rendezvous handlers, by scheme.
        no_store: makes a store that fails at each use. A process that joins uses no store.
    """
    usual = handlers["env"]

    def env(url: str, *args: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
        if wanted():
            yield no_store(), 0, 1
        else:
            yield from usual(url, *args, **options)

    handlers["env"] = env
