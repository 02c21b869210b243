"""Verbs and options of `fireflyer failures`."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.options import JsonOption

failures = typer.Typer(
    name="failures", no_args_is_help=False, rich_markup_mode=None,
    help="Count failures of hardware, and generate random traces of failures.",
)  # fmt: skip


@failures.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@failures.command()
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE", help="CSV of failures, or output of `fireflyer events --json`."
        ),
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Report the raw data of the paper's Tables VI to VIII.")
    ] = False,
    home: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Report what the server of this platform observed."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the fleet; default: those of --home.")
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=36_500,
            help="Days of observation, if the file lists single failures; default: first to last.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Report failures in the form of the paper's Tables VI, VII and VIII.

    Adds the mean time between failures of each class with its 95 % interval, nodes that fail
    more often than chance explains, and contradictions between the tables.

    A file has one of these headers: "xid,count,class"; "month,CLASS..."; "date,events";
    "time,node,class,xid".

    \b
      fireflyer failures report --paper
      fireflyer failures report failures.csv --nodes 1250 --days 365
    """
    from fireflyer.cli.failures import impl

    impl.report(files or [], home, nodes, days, paper=paper, json=json)


@failures.command()
def generate(
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="paper, llama3, rsc1 or rsc2.")
    ] = "paper",
    nodes: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Nodes; default: the preset's.")
    ] = None,
    days: Annotated[float, typer.Option(min=0.01, max=36_500, help="Length of the trace.")] = 365,
    seed: Annotated[int, typer.Option(min=0, help="Seed; the same seed gives the same trace.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="CSV; default: stdout.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Generate a random trace of failures with the rates of a published site.

    Writes a line "time,node,class,xid" for each failure. The trace begins on 2024-01-01. With --json
    prints the preset's source and the counts, and needs --output.

    \b
      fireflyer failures generate --preset paper --nodes 1250 --days 365 -o year.csv
      fireflyer failures report year.csv --nodes 1250 --days 365
    """
    from fireflyer.cli.failures import impl

    impl.generate(preset, nodes, days, seed, output, json=json)
