"""Verbs and options of `fireflyer config`."""

from typing import Annotated

import typer

config = typer.Typer(
    name="config", no_args_is_help=False, rich_markup_mode=None, help="Show the settings in force."
)


@config.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@config.command()
def show(
    where: Annotated[
        str | None,
        typer.Option(
            "--config",
            "-c",
            metavar="WHERE",
            help="cluster.toml, or folder of `fs up --dir`; else $FIREFLYER_FS, else none: the defaults.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")] = False,
) -> None:
    """Print every setting of the file system, and where it comes from. Secrets are not shown.

    \b
      fireflyer config show --config cluster.toml
    """
    from fireflyer.cli.config import impl

    impl.show(where, json=json)
