"""Settings and secret of a client."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fireflyer.errors import ConfigError
from fireflyer.rpc.proof import Secret

SECRET_FILE = "FIREFLYER_FS_SECRET_FILE"
SECRET = "FIREFLYER_FS_SECRET"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Timeouts and limits of a client."""

    deadline_s: float = 60.0
    """Deadline of a call in seconds, with all its retries."""
    attempt_s: float = 2.0
    """Timeout of one attempt in seconds, after which another server is tried."""
    slowest: float = 20e6
    """Lowest expected bytes per second; an attempt gets its bytes / `slowest` as additional seconds."""
    lanes: int = 8
    """Maximum number of reads and writes in flight; further calls wait."""
    senders: int = 2
    """Maximum number of storage nodes that send large answers at a time ("request to send").

    The number of nodes that prepare an answer, and do not send yet, is not limited.
    """
    local: bool = True
    """True: read data of this machine's nodes from their files, not through a connection."""
    connect_s: float = 1.0
    """Timeout of a connection to a storage node, in seconds."""
    alive_s: float = 10.0
    """Seconds between heartbeats to the metadata service while files are open for writing."""
    before_retry: Callable[[], None] | None = None
    """Callback before each further attempt of a call; an error that it raises ends the call."""

    def __post_init__(self) -> None:
        times = (self.deadline_s, self.attempt_s, self.slowest, self.connect_s, self.alive_s)
        if min(times) <= 0 or min(self.lanes, self.senders) < 1:
            raise ConfigError(f"invalid {self}: expected times, lanes and senders above 0")


def find_secret(path: str | os.PathLike[str] | None) -> Secret:
    """Loads the secret from `path`, or from the file or value in the environment.

    Returns an empty secret if there is none of these.

    Raises:
        ConfigError: the secret cannot be used.
    """
    named = path if path is not None else os.environ.get(SECRET_FILE)
    return Secret.from_file(Path(named)) if named else Secret.from_environment(SECRET)
