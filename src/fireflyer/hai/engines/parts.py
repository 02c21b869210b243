"""A node's share of a gang, and where its supervisor is, as files in a folder that engine and nodes see.

Each is written in place, because a network file system looks at a file anew when it is opened, and at a
replaced name only after a while. Imports no asyncio: supervisors use it.

    <task>/<node>.address          Announcement, by the node
    <task>/<attempt>/<node>.part   Part, by the engine; mode 0600: environment and secret
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fireflyer.hai.engines.messages import Part

if TYPE_CHECKING:
    from fireflyer.rpc.handshake import Handshake

DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Set for a job by whoever gave it the node; the ranks get them unless the task has its own."""

ROLE = 0
"""Of both sides of a handshake: there is one kind."""


class Announcement(msgspec.Struct, frozen=True):
    """Where the supervisor of a task on a node listens."""

    job: int
    """That started it: an older job's address is none."""
    host: str
    port: int


def announce(task: Path, node: str, where: Announcement) -> None:
    """Writes the announcement; the line break says that it is whole."""
    with open(task / f"{node}.address", "wb") as file:
        file.write(msgspec.json.encode(where) + b"\n")


def read_announcement(task: Path, node: str, job: int) -> Announcement | None:
    """What this job's supervisor wrote, if it did."""
    try:
        data = (task / f"{node}.address").read_bytes()
        found = msgspec.json.decode(data, type=Announcement) if data.endswith(b"\n") else None
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found is not None and found.job == job else None


def part_path(attempt: Path, node: str) -> Path:
    return attempt / f"{node}.part"


def write_part(attempt: Path, part: Part) -> None:
    """Lays a part where only this user can read it; there is an empty announcement then, too."""
    (attempt.parent / f"{part.node}.address").touch(mode=0o600)
    path = part_path(attempt, part.node)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(part))


def read_part(attempt: Path, node: str) -> Part:
    """The node's part of an attempt.

    Raises:
        OSError: it is not there, or not readable.
        MsgspecError: it is none.
    """
    part = msgspec.json.decode(part_path(attempt, node).read_bytes(), type=Part)
    devices = {name: os.environ[name] for name in DEVICES if name in os.environ}
    return msgspec.structs.replace(part, env=devices | part.env)


def server_handshake(secret: str) -> "Handshake":
    """For a supervisor: the other side of `remote.reach`."""
    from fireflyer.rpc.handshake import Handshake  # with it comes OpenSSL: 3 MB
    from fireflyer.rpc.proof import Secret

    return Handshake("server", Secret(secret.encode()), ROLE)
