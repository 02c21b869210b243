"""How a client finds the storage service of its own machine: docs/fs3-wire.md, "Same node"."""

import contextlib
import os
import secrets
from pathlib import Path

from fireflyer.fs3.config import SOCKET_PATH_BYTES

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PREFIX, SUFFIX = "local-", ".sock"


def machine() -> str:
    """Which machine this is, since it was started; "" where that is not known."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def new_socket(directory: Path) -> str:
    """Path for a socket in a node's directory, which no process before had: theirs are removed.

    Returns:
        "" where none can be: the path is too long for the kernel.
    """
    for old in directory.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            old.unlink()
    path = os.path.abspath(directory / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}")
    return path if len(os.fsencode(path)) <= SOCKET_PATH_BYTES else ""


def advertised(path: str) -> str:
    """What a node tells of its socket; "" if it has none."""
    here = machine()
    return f"{here}:{path}" if here and path else ""


def reached(told: str) -> str:
    """The address of a node's socket, if it is on this machine, as far as the node's word goes; else ""."""
    where, _, path = told.partition(":")
    return f"unix:{path}" if where and path and where == machine() else ""
