"""Stacks of a process that was not prepared for a profiler to attach (`haiprof/inside/prepare.py`),
read by py-spy if it is installed."""

import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from fireflyer.errors import ProfileError
from fireflyer.haiprof.records import Frame, Header, RankProfile, StackRecord, StackSamples


def py_spy() -> str | None:
    """Returns the path of py-spy, in this environment or in PATH; None if it is not installed."""
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def read_stacks(pid: int, seconds: float, rate_hz: float) -> RankProfile:
    """Samples the stacks of a process from outside, without changing the process.

    Raises:
        ProfileError: py-spy is not installed, or may not or cannot read the process.
    """
    program = py_spy()
    if program is None:
        raise ProfileError("py-spy is not installed: pip install py-spy")
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        command = [
            program, "record", "--pid", str(pid), "--duration", str(max(1, round(seconds))),
            "--rate", str(round(rate_hz or 100)), "--format", "raw", "--idle", "--threads",
            "--nonblocking", "--output", file.name,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
            raise ProfileError(f"py-spy cannot read process {pid}: {reason}")
        text = Path(file.name).read_text()
    return parse(text, pid, rate_hz or 100.0)


def parse(text: str, pid: int, rate_hz: float) -> RankProfile:
    """Returns the samples of py-spy's raw format: `thread;function (file:line);... count`."""
    header = Header(
        pid=pid, monotonic_ns=0, wall_ns=0, rate_hz=rate_hz,
        missing={"phase": "the process was not prepared: stacks only, through py-spy"},
    )  # fmt: skip
    profile = RankProfile(header)
    for number, line in enumerate(text.splitlines()):
        words, _, count = line.rpartition(" ")
        thread, *frames = words.split(";")
        profile.add(StackRecord(number=number, frames=tuple(_frame(each) for each in frames)))
        profile.add(
            StackSamples(
                thread=thread, main="MainThread" in thread,
                at_ns=[0], stacks=[number], weights=[int(count)],
            )
        )  # fmt: skip
    return profile


def _frame(text: str) -> Frame:
    function, _, place = text.rpartition(" (")
    file, _, line = place.rstrip(")").rpartition(":")
    return Frame(function, file or place.rstrip(")"), int(line) if line.isdecimal() else 0)
