"""Verbs and options of `fireflyer config`."""

from typing import Annotated

import typer

from fireflyer.cli.options import HomeOption, JsonOption

config = typer.Typer(
    name="config",
    no_args_is_help=False,
    rich_markup_mode=None,
    help="Show the settings in force, and the files that hold them.",
)

WhereOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="WHERE",
        help="cluster.toml, or folder of `fs up --dir`. Default: $FIREFLYER_FS, else default values.",
    ),
]


@config.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@config.command()
def show(where: WhereOption = None, json: JsonOption = False, home: HomeOption = None) -> None:
    """Print every setting and where it comes from. Secrets are not shown.

    \b
      fireflyer config show --config cluster.toml
    """
    from fireflyer.cli.config import impl

    impl.show(where, home, json=json)


@config.command()
def path(where: WhereOption = None, json: JsonOption = False, home: HomeOption = None) -> None:
    """Print the files that hold settings, and which of them exist."""
    from fireflyer.cli.config import impl

    impl.paths(where, home, json=json)
