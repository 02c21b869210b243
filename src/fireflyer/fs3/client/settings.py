"""What a client can be told."""

import os
from dataclasses import dataclass
from pathlib import Path

from fireflyer.errors import ConfigError
from fireflyer.rpc.proof import Secret

SECRET_FILE = "FIREFLYER_FS_SECRET_FILE"
SECRET = "FIREFLYER_FS_SECRET"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a client behaves."""

    deadline_s: float = 60.0
    """How long a call may take, with all its retries."""
    attempt_s: float = 2.0
    """How long one attempt may, before another server is tried; more for many bytes."""
    slowest: float = 20e6
    """Bytes per second that every connection makes at least: what "more" means."""
    lanes: int = 8
    """Calls that move bytes at a time; others wait."""
    senders: int = 2
    """Storage nodes that may send much at a time ("request to send"); what they do before takes no turn."""
    local: bool = True
    """What nodes of this machine have is read from their files, not through a connection."""
    connect_s: float = 1.0
    """For one connection to a storage node."""
    alive_s: float = 10.0
    """How often the metadata service hears of this client while it has files open for writing."""

    def __post_init__(self) -> None:
        times = (self.deadline_s, self.attempt_s, self.slowest, self.connect_s, self.alive_s)
        if min(times) <= 0 or min(self.lanes, self.senders) < 1:
            raise ConfigError(f"a client needs times, lanes and senders above zero: {self}")


def find_secret(path: str | os.PathLike[str] | None) -> Secret:
    """From this file, else from the file or the value that the environment names; else none.

    Raises:
        ConfigError: if there is one that cannot be used.
    """
    named = path if path is not None else os.environ.get(SECRET_FILE)
    return Secret.from_file(Path(named)) if named else Secret.from_environment(SECRET)
