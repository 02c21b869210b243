"""Verbs and options of `fireflyer net`."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.options import JsonOption

net = typer.Typer(
    name="net", no_args_is_help=False, rich_markup_mode=None, help="Plan and check a network."
)

PresetOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="fire-flyer2, fat-tree2, fat-tree3, dgx-a100 or multi-plane."
    ),
]


@net.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@net.command()
def plan(
    preset: PresetOption = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Plan two zones for this many compute nodes.")
    ] = None,
    storage: Annotated[
        int, typer.Option(min=0, help="Storage nodes of --nodes, one port in each zone.")
    ] = 0,
    cross: Annotated[
        int, typer.Option(min=2, help="Links from each zone of --nodes to the other.")
    ] = 20,
    compare: Annotated[
        bool, typer.Option("--compare", help="Print Tables II and III of the paper side by side.")
    ] = False,
    dollars: Annotated[
        bool, typer.Option("--dollars", help="Price --preset; refused if a price is unknown.")
    ] = False,
    catalogue: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Catalogue of parts, TOML; default: the paper's parts."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Count the switches, ports and cables of a network, and price it.

    \b
      fireflyer net plan --preset fire-flyer2
      fireflyer net plan --nodes 1200 --storage 180 --json
      fireflyer net plan --compare
    """
    from fireflyer.cli.net import impl

    impl.plan(
        preset, nodes, storage, cross, compare=compare, dollars=dollars, catalogue=catalogue,
        json=json,
    )  # fmt: skip


@net.command()
def verify(
    preset: PresetOption = None,
    json: JsonOption = False,
) -> None:
    """Check that routes reach every pair, form no credit loop, and spread over the links.

    \b
      fireflyer net verify --preset fire-flyer2
    """
    from fireflyer.cli.net import impl

    raise typer.Exit(impl.verify(preset, json=json))
