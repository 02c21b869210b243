"""Implementation of `fireflyer prof`."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from fireflyer.cli.printing import show_result, table
from fireflyer.cli.prof.targets import Targets, find
from fireflyer.errors import ConfigError, ProfileError
from fireflyer.haiprof.attach import enable as environment
from fireflyer.haiprof.attach import unprepared
from fireflyer.haiprof.attach.collect import Attached, Options, collect, read_profile
from fireflyer.haiprof.attach.target import NotPrepared, Target
from fireflyer.haiprof.explain.compare import compare as compared
from fireflyer.haiprof.recorders.registry import INSIDE, available
from fireflyer.haiprof.records import RankProfile
from fireflyer.haiprof.report import text
from fireflyer.haiprof.report.document import document
from fireflyer.haiprof.report.html import page
from fireflyer.haiprof.report.prometheus import exposition
from fireflyer.haiprof.trace_file import trace
from fireflyer.program import plain
from fireflyer.storage.targets import replace_content

START_TIMEOUT_S = 60.0
"""Maximum time for a script to become attachable, including the start of its interpreter."""


def options(
    seconds: float, recorders: str, intervals: Sequence[str] | None, rate: float, trace: int,
    timeout: float = 10.0,
) -> Options:  # fmt: skip
    """Returns the options of a command line and of the HAIPROF_<NAME>_INTERVAL variables."""
    found: dict[str, float] = {}
    for name in [*available(), *INSIDE]:
        value = os.environ.get(f"HAIPROF_{name.upper()}_INTERVAL")
        if value:
            found[name] = _number(f"HAIPROF_{name.upper()}_INTERVAL", value)
    for item in intervals or ():
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"invalid --interval {item!r}: expected NAME=SECONDS")
        found[name] = _number("--interval", value)
    return Options(
        seconds=seconds, recorders=recorders, intervals=found, rate_hz=rate, trace_steps=trace,
        timeout_s=timeout,
    )  # fmt: skip


def run(
    script: str, args: Sequence[str], asked: Options, seconds: float | None, warmup: float,
    output: Path | None,
) -> int:  # fmt: skip
    """Runs a script; profiles it if `seconds` is given. Returns the script's exit code."""
    command = [sys.executable, "-m", "fireflyer.haiprof.inside.run", script, *args]
    if seconds is None:
        sys.stdout.flush()
        os.execv(command[0], command)
    child = subprocess.Popen(command)
    try:
        if _becomes_attachable(child, warmup):
            attached = collect([child.pid], replace(asked, from_first_step=True), output)
            _tell_failures(attached)
            profiles = [one.profile for one in attached]
            _store(profiles, output)
            for line in text.lines(document(profiles)):
                sys.stderr.write(plain(line) + "\n")
    except ProfileError as error:
        sys.stderr.write(f"fireflyer: {plain(str(error))}\n")
    except KeyboardInterrupt:
        pass  # the terminal also signals the script
    code = child.wait()
    return code if code >= 0 else 128 - code


def _becomes_attachable(child: "subprocess.Popen[bytes]", warmup: float) -> bool:
    """Waits until the script's process can be attached to, and then for `warmup` seconds.

    Returns False if the process ends earlier or is not attachable in time.
    """
    end = time.monotonic() + START_TIMEOUT_S
    begin = None
    while child.poll() is None and time.monotonic() < end:
        try:
            with Target(child.pid) as target:
                target.signal_number()
            begin = begin or time.monotonic()
            if time.monotonic() - begin >= warmup:
                return True
            end = max(end, begin + warmup + 1)
        except ProfileError:
            pass
        time.sleep(0.02)
    return False


def attach(
    names: Sequence[str], asked: Options, output: Path | None, home: Path | None, *, wait: bool,
    warmup: float, json: bool,
) -> None:  # fmt: skip
    """Profiles processes or a task and prints the report."""
    targets = find(names, home, wait=wait)
    folder = output or targets.folder
    if warmup:
        time.sleep(warmup)
    try:
        attached = collect(targets.pids, replace(asked, from_first_step=wait), folder)
    except NotPrepared as error:
        profiles = _stacks_only(targets, asked, error)
    else:
        profiles = [one.profile for one in attached]
        _tell_failures(attached)
    _store(profiles, folder)
    _show(profiles, json=json)
    if folder is not None and not json:
        sys.stdout.write(f"\nstored in {plain(str(folder))}\n")


def _stacks_only(targets: Targets, asked: Options, error: NotPrepared) -> list[RankProfile]:
    """Reads the stacks of processes that are not prepared, from outside.

    Raises:
        ProfileError: with `error` and a second reason, if the stacks cannot be read either.
    """
    try:
        return [unprepared.read_stacks(p, asked.seconds, asked.rate_hz) for p in targets.pids]
    except ProfileError as other:
        raise ProfileError(f"{error}; {other}") from None


def _tell_failures(attached: Sequence[Attached]) -> None:
    for one in attached:
        rank = one.profile.header.rank
        if one.session.failure:
            sys.stderr.write(f"fireflyer: rank {rank}: {plain(one.session.failure)}\n")
        if one.session.dropped:
            sys.stderr.write(f"fireflyer: rank {rank}: lost {one.session.dropped} events\n")


def top(names: Sequence[str], asked: Options, home: Path | None) -> None:
    """Shows a live table until the time is up, Ctrl-C, or the end of all processes."""
    from rich.console import Console
    from rich.live import Live

    from fireflyer.haiprof.report.live import table as view

    targets = find(names, home, wait=False)
    with Live(console=Console(), auto_refresh=False) as live:
        try:
            _collect_shown(targets, asked, lambda found: live.update(view(found), refresh=True))
        except KeyboardInterrupt:
            return


def _collect_shown(
    targets: Targets, asked: Options, show: Callable[[list[Attached]], None]
) -> None:
    last = 0.0

    def at_times(attached: list[Attached]) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5:
            last = time.monotonic()
            for one in attached:
                del one.profile.steps[:-100], one.profile.samples["basic"][:-100]
            show(attached)

    show(collect(targets.pids, asked, None, at_times))


def report(
    folder: Path, html: Path | None, prometheus: Path | None, trace_to: Path | None, *, json: bool
) -> None:
    """Explains a stored profile and writes its other forms."""
    profiles = read_profile(folder)
    found = document(profiles)
    if html is not None:
        replace_content(html, page(found, profiles).encode())
    if prometheus is not None:
        replace_content(prometheus, exposition(found).encode())
    if trace_to is not None:
        replace_content(trace_to, trace(profiles))
    _show(profiles, json=json)


def compare(before: Path, after: Path, *, json: bool) -> None:
    """Compares two stored profiles."""
    changes = [
        {**msgspec.to_builtins(change), "clear": change.clear}
        for change in compared(read_profile(before), read_profile(after))
    ]
    lines = (f"{line}\n" for line in text.changes(changes))
    show_result(changes, lambda: sys.stdout.writelines(lines), json=json)


def enable(*, json: bool) -> None:
    """Writes the `.pth` file and prints its path."""
    path = str(environment.enable())
    show_result({"file": path}, lambda: sys.stdout.write(f"{plain(path)}\n"), json=json)


def disable(*, json: bool) -> None:
    """Removes the `.pth` file."""
    removed = environment.disable()
    line = "" if removed else "profiling was not enabled\n"
    show_result({"removed": removed}, lambda: sys.stdout.write(line), json=json)


def recorders(*, json: bool) -> None:
    """Lists the recorders."""
    found: list[dict[str, Any]] = [
        {"name": name, "interval_s": None, "missing": None} for name in INSIDE
    ]
    for name, make in available().items():
        recorder = make(os.getpid())
        found.append(
            {"name": name, "interval_s": recorder.interval_s, "missing": recorder.missing()}
        )
    found.sort(key=lambda one: str(one["name"]))
    rows = [
        (str(r["name"]), f"{r['interval_s']:g} s" if r["interval_s"] else "each event",
         str(r["missing"] or "available"))
        for r in found
    ]  # fmt: skip
    show_result(found, lambda: table(("RECORDER", "INTERVAL", "STATE"), rows), json=json)


def _show(profiles: Sequence[RankProfile], *, json: bool) -> None:
    found = document(profiles)
    lines = (f"{plain(line)}\n" for line in text.lines(found))
    show_result(found, lambda: sys.stdout.writelines(lines), json=json)


def _store(profiles: Sequence[RankProfile], folder: Path | None) -> None:
    """Writes the trace and the page beside the records of the ranks."""
    if folder is None or not folder.is_dir():
        return
    replace_content(folder / "report.html", page(document(profiles), profiles).encode())
    if any(profile.spans or profile.operators for profile in profiles):
        replace_content(folder / "trace.json", trace(profiles))


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"invalid {name} {value!r}: expected a number of seconds") from None
