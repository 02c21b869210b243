"""What the commands of `fireflyer bench` share: options, progress and the report."""

import shlex
import sys
import time
from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from fireflyer.bench import options
from fireflyer.bench.report import Machine, NcclRow, Report, Row, emit

JsonTo = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="[FILE]", help="write the report as JSON; '-' or nothing: stdout"
    ),
]
Rounds = Annotated[int, typer.Option(min=1, help="interleaved rounds; medians are shown")]


def say(text: str) -> None:
    """What goes on now, in place on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def teller() -> Callable[[str], None]:
    """`say` on a terminal; elsewhere lines of a log: one for each case, what comes before a colon."""
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
    name: str, machine: Machine, rows: list[Row], nccl: list[NcclRow], json_to: str | None
) -> None:
    command = shlex.join(["fireflyer", "bench", *sys.argv[1:]])
    emit(Report(bench=name, command=command, machine=machine, rows=rows, nccl=nccl), json_to)


def sizes_of(text: str) -> tuple[int, ...]:
    """Raises BadParameter for what is no list of sizes."""
    try:
        return tuple(options.parse_size(size.strip()) for size in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def names_of(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Raises BadParameter for a name that is not known."""
    try:
        return options.parse_names(text, known)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def layouts_of(text: str) -> tuple[tuple[int, int], ...]:
    """Raises BadParameter for what is no list of hosts x ranks a host."""
    try:
        return options.parse_layouts(text)
    except ValueError as error:
        raise typer.BadParameter(f"--layouts: {error}") from None
