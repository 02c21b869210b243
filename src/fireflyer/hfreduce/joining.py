"""`init_process_group("hfreduce")` in a process that FIREFLYER_JOIN sends to a group that runs already.

FIREFLYER_JOIN is a list of join addresses of members, with commas, or the path of a file with one a line.
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
    """Whether this process is to join a group."""
    return bool(os.environ.get(VARIABLE))


def addresses() -> list[str]:
    """Of members, as FIREFLYER_JOIN names them now.

    Raises:
        ConfigError: it names no file that can be read, or none are in there.
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
            f"{VARIABLE}={value}: neither HOST:PORT/NAME,... nor a file of them: {error.strerror}"
        ) from error
    if not found:
        raise ConfigError(f"{VARIABLE}={value}: the file has no address of a member")
    return found


def write_doors(path: str | os.PathLike[str], doors: list[str]) -> None:
    """Puts addresses into a file for FIREFLYER_JOIN; whoever reads it meanwhile sees the old or the new ones.

    Raises:
        ConfigError: it cannot be written.
    """
    draft = f"{os.fspath(path)}.{os.getpid()}"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write("\n".join(doors) + "\n")
        os.replace(draft, path)
    except OSError as error:
        raise ConfigError(f"cannot write the doors to {path}: {error.strerror}") from error


def stand_in(handlers: MutableMapping[str, Rendezvous], no_store: Callable[[], Any]) -> None:
    """Lets torch's `env://` ask for neither RANK, WORLD_SIZE nor a store where this process is to join.

    Args:
        handlers: torch's, by scheme.
        no_store: makes a store that fails at each use: nothing but hfreduce can do with it.
    """
    usual = handlers["env"]

    def env(url: str, *args: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
        if wanted():
            yield no_store(), 0, 1
        else:
            yield from usual(url, *args, **options)

    handlers["env"] = env
