"""Process of one check: runs the check's function and writes its measurements.

`python -m fireflyer.validator.process` reads a request from stdin and writes one line for each
figure to descriptor 3. Thus text that a library prints to stdout does no harm. An expected
exception is also reported in one line. The parent treats every other end as a crash.
"""

import os
import sys

import msgspec

from fireflyer.validator.model import Check, Measured, NotRun, Settings, function_of

OUTPUT = 3
"""File descriptor of the results."""


class Request(msgspec.Struct, frozen=True):
    """Check to run, and the settings of the validation."""

    check: Check
    settings: Settings


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the answer."""

    measured: Measured | None = None
    not_run: str = ""
    error: str = ""


def main() -> int:
    """Runs the check that stdin names; returns the exit code."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    try:
        for measured in function_of(request.check)(request.settings):
            _write(Line(measured=measured))
    except NotRun as error:
        _write(Line(not_run=str(error)))
    except PermissionError as error:
        _write(Line(not_run=f"needs root: {error}"))
    except (OSError, MemoryError, ArithmeticError, ValueError, RuntimeError) as error:
        _write(Line(error=f"{type(error).__name__}: {error}"))
    return 0


def _write(line: Line) -> None:
    data = msgspec.json.encode(line) + b"\n"
    while data:
        data = data[os.write(OUTPUT, data) :]


if __name__ == "__main__":
    sys.exit(main())
