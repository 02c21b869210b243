"""Folders of runs, and the cleanup after demos that were killed.

A living demo holds a lock on the file `running` in its run's folder, and removes the file at its
end. A folder with that file but without a lock holder belongs to a killed demo. A folder without
the file was kept for the user.
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
    """Creates a folder below `directory` that no other demo removes during the block."""
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=directory))
    early, running = folder / ".running", folder / _RUNNING
    descriptor = os.open(early, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        early.rename(running)  # other demos see the file only once it is locked
        yield folder
    finally:
        running.unlink(missing_ok=True)
        os.close(descriptor)


def sweep(directory: Path) -> list[Path]:
    """Ends the processes of killed demos' runs below `directory`, and removes the runs' folders.

    Args:
        directory: must be spelled as for `new`, because its name marks the processes.

    Returns:
        The removed folders.
    """
    swept = []
    for running in sorted(directory.glob(f"run-*/{_RUNNING}")):
        with suppress(OSError):  # locked by a living demo, removed, or owned by another user
            descriptor = os.open(running, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.stat(running)  # missing if a demo that was about to end has removed it
                processes.end(str(running.parent))
                shutil.rmtree(running.parent)
                swept.append(running.parent)
            finally:
                os.close(descriptor)
    return swept
