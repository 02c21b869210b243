"""Implementation of `fireflyer run --prof`: a profile of the task's first attempt, from its first step.

A separate process attaches to the ranks, so a detached task is profiled, too.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from fireflyer.cli.prof.impl import options
from fireflyer.cli.prof.targets import check_local
from fireflyer.cli.run.impl import Launch, launch, note
from fireflyer.errors import ConfigError
from fireflyer.hai.client import Client
from fireflyer.hai.home import profile_folder
from fireflyer.hai.model import TaskView
from fireflyer.program import plain

KEYS = ("time", "warmup", "recorders", "trace", "rate")
ATTACH_TIMEOUT_S = 120
"""Seconds that the profiler waits for a rank's answer. A rank answers only in Python code, and its
native code may wait for other ranks after the start."""

FINISH_TIMEOUT_S = 60.0
"""Maximum number of seconds to wait, after the end of the task, until the profiler has written its
files."""


def parse(text: str) -> dict[str, str]:
    """Returns the options of `--prof`: `time=120,recorders=basic,phase,trace=1`.

    A word without `=` belongs to the list before it.

    Raises:
        ConfigError: a key is unknown or a value cannot be used.
    """
    found: dict[str, str] = {}
    last = ""
    for item in text.split(","):
        key, equals, value = item.strip().partition("=")
        if not equals and last == "recorders":
            found[last] += f",{key}"
            continue
        if not value or key not in KEYS or key in found:
            raise ConfigError(
                f"invalid --prof {item.strip()!r}: expected KEY=VALUE, each of {', '.join(KEYS)} at "
                "most once"
            )
        found[key] = value
        last = key
    numbers = {key: _number(key, found[key]) for key in found if key != "recorders"}
    asked = options(
        numbers.get("time", 5.0), found.get("recorders", "phase"), None, numbers.get("rate", 0.0),
        int(numbers.get("trace", 0)),
    )  # fmt: skip
    asked.check()
    return found


def _number(key: str, text: str) -> float:
    from fireflyer.cli.numbers import is_plain

    try:
        value = float(text) if key != "trace" else int(text)
    except ValueError:
        value = -1
    if not (is_plain(text) and 0 <= value < 1e9):
        raise ConfigError(f"invalid --prof {key}={text}: expected a number, at least 0")
    return value


def profiled(
    request: Launch, home: Path | None, text: str, *, detach: bool, all_ranks: bool, json: bool
) -> int:
    """Runs the task and profiles it; returns the exit code of the task.

    Args:
        request: the task.
        home: the platform's folder.
        text: value of `--prof`.
        detach, all_ranks, json: as for `run`.

    Raises:
        ConfigError, ProfileError: the value is invalid, or this task or platform cannot be profiled.
    """
    asked = parse(text)
    if request.job.start == "exec":
        raise ConfigError("--prof needs ranks that are forked: omit --start exec")
    check_local(home, "--prof works on one machine; the ranks of this platform")
    return launch(
        replace(request, job=replace(request.job, start="fork")),
        home, detach=detach, all_ranks=all_ranks, json=json,
        beside=partial(Profiling, asked=asked, home=home, detach=detach),
    )  # fmt: skip


class Profiling:
    """A profiler of one task.

    Args:
        client: client of the platform.
        view: the task.
        asked: options, from `parse`.
        home: the platform's folder.
        detach: True to write messages to `haiprof.log` in the task's folder instead of stderr.
    """

    def __init__(
        self,
        client: Client,
        view: TaskView,
        *,
        asked: dict[str, str],
        home: Path | None,
        detach: bool,
    ) -> None:
        self._client, self._task = client, view.id
        words = [word for key, value in asked.items() for word in (f"--{key}", value)]
        if home is not None:
            words += ["--home", str(home)]
        command = [
            sys.executable, "-m", "fireflyer.cli.prof", "attach", view.id, "--wait",
            "--timeout", str(ATTACH_TIMEOUT_S), *words,
        ]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if k != "HAIPROF_LOG_DIR"}
        log = _messages(Path(view.directory)) if detach else None
        try:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        finally:
            if log is not None:
                os.close(log)

    def finish(self) -> None:
        """Waits after the task's end until the profiler has written its files; prints the
        folder of the files."""
        try:
            code = self._process.wait(FINISH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            note(f"the profiler of {self._task} still runs, as process {self._process.pid}")
            return
        if code == 0:
            folder = _newest(Path(self._client.task(self._task).directory))
            note(f"profile of {self._task}: fireflyer prof report {plain(str(folder))}")


def _messages(folder: Path) -> int:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(folder / "haiprof.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _newest(folder: Path) -> Path:
    attempts = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    found = [profile_folder(folder, number) for number in sorted(attempts)]
    return [path for path in found if path.is_dir()][-1]
