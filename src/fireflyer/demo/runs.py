"""The folders of runs, and the end of those whose demo was killed and could not end them itself.

While a demo lives it holds a lock on the file `running` in its run's folder, and it removes the file at
its end. So a folder with that file and without a holder belongs to a demo that was killed; one
without the file was kept for a person.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fireflyer.demo import processes

_RUNNING = "running"


@contextmanager
def new(directory: Path) -> Iterator[Path]:
    """A new folder below `directory` that no other demo sweeps away during the block."""
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=directory))
    early, running = folder / ".running", folder / _RUNNING
    descriptor = os.open(early, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        early.rename(running)  # nobody finds it without its lock
        yield folder
    finally:
        running.unlink(missing_ok=True)
        os.close(descriptor)


def sweep(directory: Path) -> list[Path]:
    """Ends the processes of runs below `directory` whose demo was killed, and removes their folders.

    Args:
        directory: spelled as it was for `new`, since its name marks the processes.

    Returns:
        The folders that are gone.
    """
    swept = []
    for running in sorted(directory.glob(f"run-*/{_RUNNING}")):
        with suppress(OSError):  # held by a living demo, gone meanwhile, or another user's
            descriptor = os.open(running, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.stat(running)  # a demo that was just ending has removed it
                processes.end(str(running.parent))
                shutil.rmtree(running.parent)
                swept.append(running.parent)
            finally:
                os.close(descriptor)
    return swept
