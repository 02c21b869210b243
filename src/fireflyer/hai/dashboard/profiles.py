"""Profiles that `fireflyer prof` stored beside the logs of a task's attempts."""

import stat
from contextlib import suppress
from pathlib import Path

import msgspec

from fireflyer.errors import TaskError
from fireflyer.hai.home import profile_folder
from fireflyer.hai.model import TaskView

REPORT, TRACE = "report.html", "trace.json"
MOST_ATTEMPTS = 20
"""Number of newest attempts whose profiles a page shows."""

REPORT_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; "
    "form-action 'none'; base-uri 'none'"
)
"""Content-Security-Policy of a report, which a task may have written: the report runs no script, gets
an opaque origin and loads nothing; inline styles are allowed."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Files of one attempt's profile."""

    attempt: int
    trace: bool
    """True if there is a trace for ui.perfetto.dev."""


def of_task(view: TaskView) -> tuple[Profile, ...]:
    """Returns the profiles of the newest attempts, newest first."""
    oldest = max(1, view.attempt - MOST_ATTEMPTS + 1)
    return tuple(
        Profile(attempt=number, trace=_is_file(_path(view, number, TRACE)))
        for number in range(view.attempt, oldest - 1, -1)
        if _is_file(_path(view, number, REPORT))
    )


def find(view: TaskView, attempt: int, name: str) -> Path:
    """Returns a file of a profile.

    Raises:
        TaskError: there is no such file.
    """
    path = _path(view, attempt, name)
    if not _is_file(path):
        raise TaskError(
            f"task {view.id} has no {name} of attempt {attempt}: the attempt was not profiled"
        )
    return path


def _path(view: TaskView, attempt: int, name: str) -> Path:
    return profile_folder(view.directory, attempt) / name


def _is_file(path: Path) -> bool:
    """Returns whether the path is a regular file in a folder. A symbolic link, which a task may
    have created, is neither."""
    with suppress(OSError):
        folder, file = path.parent.lstat().st_mode, path.lstat().st_mode
        return stat.S_ISDIR(folder) and stat.S_ISREG(file)
    return False
