"""Shared parts of the `fireflyer bench` commands: options, progress and the report."""

import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from fireflyer.bench.harness import options
from fireflyer.bench.harness.report import Machine, NcclRow, Report, Row, emit
from fireflyer.program import json_option
from fireflyer.units import parse_size

JsonOption = Annotated[bool, json_option()]
OutputOption = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Write the report as JSON to FILE.")
]
Rounds = Annotated[
    int, typer.Option(min=1, help="Number of interleaved rounds; the report shows medians.")
]

FileSystemsAt = Annotated[
    Path, typer.Option(metavar="DIR", help="Folder for the file systems; removed afterwards.")
]
PeerPrograms = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of the peers' programs, fetched when needed; default: peers in --work.",
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="Use tiny sizes to check that the benchmark runs; the figures mean little."
    ),
]


def say(text: str) -> None:
    """Shows the current activity, in place on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def progress() -> Callable[[str], None]:
    """Returns `say` on a terminal; elsewhere a logger that prints one line per case.

    The case is the text before the first colon.
    """
    if sys.stderr.isatty():
        return say
    last = ""

    def log(text: str) -> None:
        nonlocal last
        case = text.partition(":")[0]
        if case != last:
            last = case
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {case}\n")
            sys.stderr.flush()

    return log


def report(
    name: str, machine: Machine, rows: list[Row], nccl: list[NcclRow], *, json: bool,
    output: Path | None,
) -> None:  # fmt: skip
    """Prints the report of a command, and writes it to `output` if that is given."""
    command = shlex.join(["fireflyer", "bench", *sys.argv[1:]])
    found = Report(bench=name, command=command, machine=machine, rows=rows, nccl=nccl)
    emit(found, json=json, output=output)


def sizes_of(text: str) -> tuple[int, ...]:
    """Parses a list of sizes; raises BadParameter if it is invalid."""
    try:
        return tuple(parse_size(size) for size in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def names_of(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Parses a list of names; raises BadParameter for an unknown name."""
    try:
        return options.parse_names(text, known)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def layouts_of(text: str) -> tuple[tuple[int, int], ...]:
    """Parses a list of hosts x ranks per host; raises BadParameter if it is invalid."""
    try:
        return options.parse_layouts(text)
    except ValueError as error:
        raise typer.BadParameter(f"--layouts: {error}") from None
