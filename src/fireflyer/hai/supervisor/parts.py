"""Files that engine and nodes share: a node's part of a gang, and the address of its supervisor.

Each file is written in place, not renamed into place. On a network file system, a client sees new
content as soon as it opens the file, but sees a renamed file only after a delay. Every supervisor
imports this module, so it must not import asyncio, which takes time and memory.

    <task>/<node>.address          Announcement, by the node
    <task>/<attempt>/<node>.part   Part, by the engine; mode 0600, because it contains a secret
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fireflyer.hai.supervisor.messages import Part

if TYPE_CHECKING:
    from fireflyer.rpc.handshake import Handshake

DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that the node's resource manager sets for a job. Ranks inherit them unless the task
sets them itself."""

ROLE = 0
"""Role of both peers in a handshake; this protocol has only one role."""


class Announcement(msgspec.Struct, frozen=True):
    """Address on which the supervisor of a task on a node listens."""

    job: int
    """Job that started the supervisor; addresses of older jobs are ignored."""
    host: str
    port: int


def announce(task: Path, node: str, where: Announcement) -> None:
    """Writes the announcement; the line break marks it as complete."""
    with open(task / f"{node}.address", "wb") as file:
        file.write(msgspec.json.encode(where) + b"\n")


def read_announcement(task: Path, node: str, job: int) -> Announcement | None:
    """Returns the announcement of this job's supervisor; None if the supervisor has not written it
    yet."""
    try:
        data = (task / f"{node}.address").read_bytes()
        found = msgspec.json.decode(data, type=Announcement) if data.endswith(b"\n") else None
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found is not None and found.job == job else None


def part_path(attempt: Path, node: str) -> Path:
    return attempt / f"{node}.part"


def write_part(attempt: Path, part: Part) -> None:
    """Writes a part that only this user can read, and creates an empty announcement."""
    (attempt.parent / f"{part.node}.address").touch(mode=0o600)
    path = part_path(attempt, part.node)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(part))


def read_part(attempt: Path, node: str) -> Part:
    """Reads the node's part of an attempt.

    Raises:
        OSError: the file is missing or not readable.
        MsgspecError: the file does not contain a part.
    """
    part = msgspec.json.decode(part_path(attempt, node).read_bytes(), type=Part)
    devices = {name: os.environ[name] for name in DEVICES if name in os.environ}
    return msgspec.structs.replace(part, env=devices | part.env)


def server_handshake(secret: str) -> "Handshake":
    """Returns the supervisor's side of the handshake; the engine's side is in `remote.reach`."""
    from fireflyer.rpc.handshake import Handshake  # loads OpenSSL: 3 MB
    from fireflyer.rpc.proof import Secret

    return Handshake("server", Secret(secret.encode()), ROLE)
