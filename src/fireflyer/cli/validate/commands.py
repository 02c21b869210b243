"""Verbs and options of `fireflyer validate`."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.options import JsonOption

validate = typer.Typer(
    name="validate", no_args_is_help=False, rich_markup_mode=None,
    help="Find the nodes that are worse than the others.",
)  # fmt: skip


@validate.callback(invoke_without_command=True)
def check_node(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@validate.command()
def fleet(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.csv", help="Columns node, check, value, better (more|less)."),
    ],
    json: JsonOption = False,
) -> None:
    """Name the nodes whose measurements are worse than those of the fleet.

    The criterion and the thresholds are learnt from the file, so it needs at least 3 nodes; 20
    measurements a node and check are a good number. Two plain rules are shown for comparison: 5 %
    below the fleet's median, and 3 robust standard deviations. Exits with 0 also if nodes are
    defective.

    \b
      fireflyer validate fleet measurements.csv
    """
    from fireflyer.cli.validate import impl

    impl.fleet(file, json=json)
