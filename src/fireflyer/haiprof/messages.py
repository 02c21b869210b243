"""Messages between profiler and agent, and the socket on which they meet.

The profiler listens on a Unix socket in a folder that only the user can enter. The socket's name
contains the process id of the target, so the agent finds it without configuration. Both sides check
that the other process has the same user; the agent also accepts root.
"""

import os
import socket
import stat
import struct
from pathlib import Path

import msgspec

VERSION = 2


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """First message from profiler to agent."""

    version: int = VERSION
    seconds: float
    """Time after which the agent detaches by itself."""
    phases: bool = True
    rate_hz: float = 0.0
    """Stack samples a second; 0: none."""
    operator_steps: int = 0
    """Steps to record with torch.profiler."""
    collectives: bool = False
    """Record size and peers of each collective."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message from agent to profiler; sent again when torch is loaded."""

    version: int = VERSION
    pid: int
    base_ns: int
    """Monotonic time at the start of the session, to which all times are relative."""
    rank: int = 0
    world: int = 1
    torch: bool = False


class Batch(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    """Agent to profiler: events and samples since the last batch. Times are relative to
    `base_ns`."""

    events: bytes = b""
    labels: dict[int, str] = {}
    """New labels by number."""
    stacks: list[tuple[int, list[tuple[str, str, int]], bool]] = []
    """New stacks: number, functions (outermost first), True if the innermost function acquires a
    lock."""
    samples: list[tuple[int, int, int, int]] = []
    """Time, thread, stack, weight."""
    threads: dict[int, str] = {}
    """Names of threads that no earlier batch named."""
    collectives: list[tuple[str, int, int, list[int]]] = []
    """Name, time, bytes, global ranks."""
    training_thread: int = 0
    """Thread whose optimizers step; 0: no optimizer has stepped yet."""
    main_thread: int = 0
    dropped: int = 0
    """Events that were lost because the profiler did not read them."""


class Operators(msgspec.Struct, frozen=True, kw_only=True, tag="operators"):
    """Agent to profiler: operators that torch.profiler recorded, on the monotonic clock."""

    names: list[str]
    spans: list[tuple[int, int, int, int]]
    """Index of the name, begin, end, thread."""


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag="bye"):
    """Last message from agent to profiler: all hooks are removed."""

    failure: str = ""


FromAgent = Hello | Batch | Operators | Bye


def meeting_folder(uid: int) -> Path:
    """Returns the folder of a user's sockets."""
    return Path(f"/tmp/fireflyer-haiprof-{uid}")


def socket_path(pid: int, uid: int) -> Path:
    """Returns the socket on which a profiler waits for the process `pid`."""
    return meeting_folder(uid) / str(pid)


def is_private(folder: Path, uid: int) -> bool:
    """Returns whether only `uid` can enter the folder."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == uid
        and not stat.S_IMODE(found.st_mode) & 0o077
    )


def peer_uid(connection: socket.socket) -> int:
    """Returns the user at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])
