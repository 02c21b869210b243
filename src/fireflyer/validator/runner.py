"""Runner of checks: each has a process of its own, with limits on time, output and disk space.

A check ends as "not run", with the reason, if it hangs, crashes, is killed, writes garbage, fills
the disk or lacks a permission. Such a check never counts as passed, and never stops the other
checks. Each process leads a session. When the process ends, the whole session is killed, and the
scratch folder of the check is removed.
"""

import contextlib
import math
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from fireflyer.validator.limits import Limits
from fireflyer.validator.model import Check, Figure, Measured, Result, Settings
from fireflyer.validator.process import OUTPUT, Line, Request

HANG_FACTOR = 8.0
"""Multiple of a check's usual duration after which it counts as hung."""

LEAST_TIMEOUT_S = 15.0

QUICK_S = 53.0
"""Time for a quick validation: a minute less the program's start and end, which take 7 s at a load
of 12 per CPU."""

OUTPUT_BYTES = 1 << 20
"""Size above which results count as garbage."""

FILE_BYTES = 4 << 30
"""Maximum size of a file that a check may write; the kernel enforces it."""

SCRATCH_BYTES = 12 << 30
"""Size of all files of a check, above which the check is killed."""

PREFIX = "fireflyer-validate-"
"""Prefix of the names of scratch folders."""

ERROR_BYTES = 16 << 20
"""Size of the text on stderr above which a check is killed."""

MEMORY = "/dev/shm"
"""Folder for scratch files of checks that measure no disk, used if the disk cannot be written."""

REASON = 300
"""Maximum length of a reason, in characters."""

Stop = Callable[[], bool]


def run(
    checks: Iterable[Check],
    settings: Settings,
    limits: Limits | None = None,
    *,
    stop: Stop = lambda: False,
    timeout_s: float | None = None,
    budget_s: float | None = None,
) -> Iterator[Result]:
    """Runs the checks one after the other and yields a result for each figure.

    Args:
        limits: fixed thresholds; None: none.
        stop: called several times a second; if true, the remaining checks are not run.
        timeout_s: timeout of each check; None: a multiple of its usual duration.
        budget_s: time for all checks: a check that could not end within it is not run, and a check
            that takes longer is killed. None: no limit.
    """
    end = time.monotonic() + (math.inf if budget_s is None else budget_s)
    for check in checks:
        left = end - time.monotonic()
        if stop():
            yield from _all_not_run(check, "stopped before the check began")
            continue
        if left < check.duration_s:
            yield from _all_not_run(check, f"the validation's {budget_s:g} s are used up")
            continue
        most_s = timeout_s or timeout(check, settings)
        over = f"the check hung: no end after {most_s:g} s"
        if left < most_s:
            over = f"the validation's {budget_s:g} s ended during the check"
        found = _run(check, settings, stop, min(left, most_s), over)
        yield from (limits.applied(result) if limits else result for result in found)


def timeout(check: Check, settings: Settings) -> float:
    """Returns the timeout of a check, in seconds."""
    factor = 1.0 if settings.quick else 10.0
    return max(HANG_FACTOR * check.duration_s * factor, LEAST_TIMEOUT_S)


def _run(check: Check, settings: Settings, stop: Stop, timeout_s: float, over: str) -> list[Result]:
    """Runs a check; `over` is the reason to give if it exceeds `timeout_s`."""
    try:
        scratch = _scratch(check, settings.directory)
    except OSError as error:
        where = error.filename or settings.directory or "the folder for temporary files"
        return _all_not_run(check, f"cannot write to {where}: {error.strerror}")
    try:
        within = msgspec.structs.replace(settings, directory=scratch)
        return _in_process(check, within, stop, timeout_s, over)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _scratch(check: Check, folder: str) -> str:
    """Makes the scratch folder of a check; checks that measure no disk may get one in memory.

    Raises:
        OSError: there is no folder that can be written.
    """
    try:
        folder = folder or tempfile.gettempdir()
        return tempfile.mkdtemp(prefix=PREFIX, dir=folder)
    except OSError as error:
        if not check.disk:
            with contextlib.suppress(OSError):
                return tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY)
        raise OSError(error.errno, error.strerror, folder or None) from None


def _in_process(
    check: Check, settings: Settings, stop: Stop, timeout_s: float, over: str
) -> list[Result]:
    # Both files lie in memory, so a full or read-only disk stops no other check.
    request = os.fdopen(os.memfd_create("request"), "w+b")
    errors = os.fdopen(os.memfd_create("errors"), "w+b")
    reading, writing = os.pipe()
    try:
        request.write(msgspec.json.encode(Request(check, settings)))
        request.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(writing)],
            stdin=request, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=(writing,),
            start_new_session=True, env=_environment(), cwd=settings.directory,
        )  # fmt: skip
        os.close(writing)
        writing = -1
        scratch = Path(settings.directory)
        output, why = _collect(process, reading, errors.fileno(), scratch, stop, timeout_s, over)
        errors.seek(0)
        said = errors.read(OUTPUT_BYTES).decode("utf-8", "replace").strip().splitlines()
    finally:
        for descriptor in (reading, writing):
            if descriptor >= 0:
                os.close(descriptor)
        request.close()
        errors.close()
    if not why and process.returncode:
        code = process.returncode
        end = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        why = f"the check {end}" + (f": {said[-1]}" if said else "")
    return _results(check, output, why)


_START = f"""
import os, sys
os.dup2(int(sys.argv[1]), {OUTPUT})
from fireflyer.validator.process import main
sys.exit(main())
"""


def _environment() -> dict[str, str]:
    one = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return os.environ | dict.fromkeys(one, "1")


def _collect(
    process: "subprocess.Popen[bytes]", reading: int, errors: int, scratch: Path, stop: Stop,
    timeout_s: float, over: str,
) -> tuple[bytes, str]:  # fmt: skip
    """Reads the results until the process ends; returns them, and the reason for a kill or ""."""
    deadline = time.monotonic() + timeout_s
    output, why, open_ = b"", "", True
    with contextlib.suppress(OSError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
    while not why:
        left = deadline - time.monotonic()
        if left <= 0:
            why = over
        elif stop():
            why = "the validation was stopped during the check"
        elif _size(scratch) > SCRATCH_BYTES:
            why = f"the check filled the disk: more than {SCRATCH_BYTES >> 20} MiB of files"
        elif os.fstat(errors).st_size > ERROR_BYTES:
            why = f"the check wrote garbage: more than {ERROR_BYTES >> 20} MiB to stderr"
        elif not open_:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(left, 0.1))
                break
        elif select.select([reading], [], [], min(left, 0.1))[0]:
            data = os.read(reading, 65536)
            open_ = bool(data)
            output += data
            if len(output) > OUTPUT_BYTES:
                why = f"the check wrote garbage: more than {OUTPUT_BYTES} bytes of results"
        elif process.poll() is not None:
            open_ = bool(select.select([reading], [], [], 0)[0])
            if not open_:
                break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return output, why


def _results(check: Check, output: bytes, why: str) -> list[Result]:
    """Returns a result for each figure of the check."""
    if len(output) > OUTPUT_BYTES:
        return _all_not_run(check, why)
    figures = {figure.name: figure for figure in check.figures}
    measured: dict[str, Measured] = {}
    for line in output.split(b"\n"):
        if not line:
            continue
        try:
            found = msgspec.json.decode(line, type=Line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _all_not_run(check, f"the check wrote garbage: {line[:40]!r}")
        why = why or found.not_run or found.error
        if found.measured is not None:
            if found.measured.name not in figures:
                return _all_not_run(check, f"the check wrote an unknown figure {line[:60]!r}")
            measured[found.measured.name] = found.measured
    missing = why or "the check ended without this figure"
    return [
        _result(figure, measured[name]) if name in measured else _not_run(figure, missing)
        for name, figure in figures.items()
    ]


def _result(figure: Figure, measured: Measured) -> Result:
    if measured.skipped:
        return _not_run(figure, measured.skipped)
    return Result(
        name=figure.name,
        status="failed" if measured.failed else "passed",
        value=measured.value,
        unit=figure.unit,
        reason=_line(measured.failed),
        better=figure.better,
        samples=measured.samples,
    )


def _all_not_run(check: Check, reason: str) -> list[Result]:
    return [_not_run(figure, reason) for figure in check.figures]


def _not_run(figure: Figure, reason: str) -> Result:
    return Result(
        name=figure.name, status="not run", value=None, unit=figure.unit, reason=_line(reason),
        better=figure.better,
    )  # fmt: skip


def _line(text: str) -> str:
    """Shortens a text to one line of at most REASON characters."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(printable.split())[:REASON]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _size(folder: Path) -> int:
    """Returns the number of bytes that a folder's files take on the disk."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += 512 * os.lstat(os.path.join(parent, name)).st_blocks
    return total
