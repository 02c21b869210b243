"""Ports for services that must know theirs before they listen; no other test or run gets the same one.

Each port is held by the lock of a file for as long as this process lives. They lie below the range that the
kernel takes the ports of outgoing connections from.
"""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

FIRST, END = 20000, 32000
_FOLDER = Path(tempfile.gettempdir()) / f"fireflyer-test-ports-{os.getuid()}"
_held: list[int] = []
"""Descriptors of the locked files."""


def _take(port: int) -> bool:
    lock = os.open(_FOLDER / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        os.close(lock)
        return False
    _held.append(lock)
    return True


def take_ports(count: int) -> list[int]:
    """So many free ports of 127.0.0.1, kept for this process until its end."""
    _FOLDER.mkdir(mode=0o700, exist_ok=True)
    found: list[int] = []
    for port in random.sample(range(FIRST, END), END - FIRST):
        if len(found) == count:
            return found
        if _take(port):
            found.append(port)
    raise OSError(f"fewer than {count} free ports from {FIRST} to {END}")
