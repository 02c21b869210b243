"""File of the flight recorder: this rank's latest operations, written when the group breaks.

The file is one JSON object with rank, world, pid, error, and `operations`, oldest first. An
operation has a number, its call as error messages show it, a state (queued, running, done, failed)
and times in nanoseconds of the monotonic clock. A comparison of the files of two ranks shows where
their calls differ.
"""

import contextlib
import json
import os
import tempfile
from pathlib import Path

from fireflyer._native import hfreduce as native
from fireflyer.log import get_logger

KEPT = 1024
"""Maximum number of files kept in the folder; older files are removed."""


def folder() -> Path:
    """Returns FIREFLYER_FLIGHT_DIR, else a folder of this user among the temporary files."""
    if named := os.environ.get("FIREFLYER_FLIGHT_DIR"):
        return Path(named)
    return Path(tempfile.gettempdir()) / f"fireflyer-flight-{os.getuid()}"


def dump(engine: native.Group, rank: int, world: int, error: BaseException) -> Path | None:
    """Writes the file, logs its path and returns it.

    Returns None if the file cannot be written, because an exception would hide `error`.
    """
    record = {
        "rank": rank,
        "world": world,
        "pid": os.getpid(),
        "error": f"{type(error).__name__}: {error}",
        "operations": engine.records(),
    }
    target = folder()
    log = get_logger("hfreduce")
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        if target.stat().st_uid != os.getuid():
            raise PermissionError(f"{target} belongs to another user")
        descriptor, name = tempfile.mkstemp(".json", f"rank{rank}-pid{os.getpid()}-", target)
        with os.fdopen(descriptor, "w") as file:
            json.dump(record, file, indent=1)
    except OSError as problem:
        log.warning("rank %d: cannot write the flight record: %s", rank, problem)
        return None
    _prune(target)
    log.error("rank %d: %s; its last operations are in %s", rank, record["error"], name)
    return Path(name)


def _prune(target: Path) -> None:
    """Removes the oldest files beyond `KEPT`; other processes may prune at the same time."""
    aged: list[tuple[float, Path]] = []
    for path in target.glob("rank*.json"):
        with contextlib.suppress(OSError):
            aged.append((path.stat().st_mtime, path))
    for _, old in sorted(aged)[:-KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()
