"""Settings and secret of a client."""

import os
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
    """Seconds that a call may take, with all its retries."""
    attempt_s: float = 2.0
    """Seconds that one attempt may take before another server is tried; many bytes get more."""
    slowest: float = 20e6
    """Least bytes per second of a connection: an attempt may take bytes / `slowest` longer."""
    lanes: int = 8
    """Maximum number of byte-moving calls in flight; further calls wait."""
    senders: int = 2
    """Maximum number of storage nodes that send much data at a time ("request to send").

    Their work before sending is not limited.
    """
    local: bool = True
    """True: data of nodes on this machine is read from their files, not through a connection."""
    connect_s: float = 1.0
    """Seconds that connecting to a storage node may take."""
    alive_s: float = 10.0
    """Seconds between heartbeats to the metadata service while files are open for writing."""

    def __post_init__(self) -> None:
        times = (self.deadline_s, self.attempt_s, self.slowest, self.connect_s, self.alive_s)
        if min(times) <= 0 or min(self.lanes, self.senders) < 1:
            raise ConfigError(f"a client needs times, lanes and senders above zero: {self}")


def find_secret(path: str | os.PathLike[str] | None) -> Secret:
    """Loads the secret from `path`, else from the file or value that the environment names.

    Returns no secret if none is named.

    Raises:
        ConfigError: the secret cannot be used.
    """
    named = path if path is not None else os.environ.get(SECRET_FILE)
    return Secret.from_file(Path(named)) if named else Secret.from_environment(SECRET)
