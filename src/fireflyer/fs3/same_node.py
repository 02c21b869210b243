"""Finds the storage service of a client's own machine: docs/internals/fs3-wire.md, "Same node"."""

import contextlib
import os
import secrets
from pathlib import Path

from fireflyer.fs3.config import SOCKET_PATH_BYTES

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PREFIX, SUFFIX = "local-", ".sock"


def machine() -> str:
    """Returns an identifier of this machine's current boot; "" if it is unknown."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def new_socket(directory: Path) -> str:
    """Returns a new socket path in a node's directory; removes the sockets of earlier processes.

    Returns:
        "" if the path is too long for the kernel.
    """
    for old in directory.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            old.unlink()
    path = os.path.abspath(directory / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}")
    return path if len(os.fsencode(path)) <= SOCKET_PATH_BYTES else ""


def advertised(path: str) -> str:
    """Returns the form in which a node advertises its socket; "" if it has no socket, or if the
    machine's identifier is unknown."""
    here = machine()
    return f"{here}:{path}" if here and path else ""


def reached(advertisement: str) -> str:
    """Returns the address of a node's socket if the node is on this machine, else ""."""
    where, _, path = advertisement.partition(":")
    return f"unix:{path}" if where and path and where == machine() else ""
