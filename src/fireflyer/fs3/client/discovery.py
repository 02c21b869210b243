"""Finds a file system by its folder, its cluster.toml or its addresses."""

import contextlib
import os
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from fireflyer.errors import ConfigError, Unavailable
from fireflyer.fs3.client.connection import TIMEOUT_S, Client, connect
from fireflyer.fs3.client.settings import Settings
from fireflyer.fs3.config import EMBEDDED, FILE, load, replace
from fireflyer.rpc.address import Address

VARIABLE = "FIREFLYER_FS"
ADDRESS_FILE = "address"


class Place(NamedTuple):
    """Addresses of a file system. `secret_file` None: the environment names the secret."""

    addresses: list[str]
    secret_file: str | None


def find(where: str | None = None) -> Place:
    """Finds a file system by the folder of `fireflyer fs up --dir`, a cluster.toml, or addresses.

    Addresses are HOST:PORT[,HOST:PORT...].

    Args:
        where: folder, file or addresses; default: the value of FIREFLYER_FS.

    Raises:
        ConfigError: `where` is none of these.
        Unavailable: the folder's file system does not run.
    """
    named = where or os.environ.get(VARIABLE, "")
    if not named:
        raise ConfigError(f"no file system given: use --dir DIR, or set {VARIABLE}")
    path = Path(named)
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        config = load(path)
        return Place([config.manager], config.secret_file or None)
    addresses = named.split(",")
    if "/" in named and not named.startswith("unix:"):
        raise ConfigError(f"{named} does not exist")
    if ":" not in named:
        raise ConfigError(
            f"{named} does not exist, and is no HOST:PORT: `fireflyer fs up --dir {quote(named)}` makes a "
            "file system there"
        )
    for address in addresses:
        Address.parse(address)
    return Place(addresses, None)


def _in_folder(folder: Path) -> Place:
    start = f"`fireflyer fs up --dir {quote(str(folder))}` starts it"
    if not (folder / FILE).exists():
        raise ConfigError(f"there is no file system in {folder}; {start}")
    config = load(folder / FILE)
    if EMBEDDED not in config.nodes:
        start = f"`fireflyer fs up --config {folder / FILE} --name NODE` starts a node of it"
    addresses = [config.manager] if config.manager else []
    with contextlib.suppress(FileNotFoundError):  # has the port that the process chose
        addresses.insert(0, (folder / ADDRESS_FILE).read_text().strip())
    for address in addresses:
        with contextlib.suppress(OSError):
            Address.parse(address).connect(1.0).close()
            return Place([address], config.secret_file or None)
    raise Unavailable(f"the file system in {folder} is not running; {start}")


def announce(folder: Path, address: str) -> None:
    """Records the address of the file system in a folder."""
    path, text = folder / ADDRESS_FILE, address + "\n"
    # An unchanged address is not written again, so the process can restart on a full disk.
    if not path.exists() or path.read_text() != text:
        replace(path, text)


def attach(
    where: str | None = None, *, settings: Settings | None = None, timeout: float = TIMEOUT_S
) -> Client:
    """Finds a file system and connects to it; raises as `find` and `connect` do."""
    place = find(where)
    return connect(
        place.addresses, secret_file=place.secret_file, settings=settings, timeout=timeout
    )
