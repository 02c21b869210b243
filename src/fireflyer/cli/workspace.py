"""`fireflyer workspace`: its verbs and options. What a verb does is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

workspace = typer.Typer(
    name="workspace",
    no_args_is_help=False,
    rich_markup_mode=None,
    help="""Look at and remove workspaces, which `fireflyer run --workspace` ships.

\b
  fireflyer run --workspace . train.py    ship this folder, run train.py in the copy
  fireflyer workspace list
  fireflyer workspace pull t1 copy        what t1 was handed in with
""",
)

Which = Annotated[
    str,
    typer.Argument(
        metavar="WORKSPACE", help="A task, or the begin of a workspace's id (6 digits)."
    ),
]
Home = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="The platform's folder; else $FIREFLYER_HOME, else ~/.local/state/fireflyer.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]


@workspace.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@workspace.command("list")
def list_(json: Json = False, home: Home = None) -> None:
    """List workspaces, the one used last first."""
    from fireflyer.cli import workspacing

    workspacing.list_all(home, json=json)


@workspace.command()
def show(which: Which, json: Json = False, home: Home = None) -> None:
    """List what is in a workspace: modes, sizes, names."""
    from fireflyer.cli import workspacing

    workspacing.show(home, which, json=json)


@workspace.command()
def pull(
    which: Which,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Not there yet, or empty.")],
    home: Home = None,
) -> None:
    """Write a workspace into a folder, as it was shipped."""
    from fireflyer.cli import workspacing

    workspacing.pull(home, which, folder)


@workspace.command()
def prune(
    older_than: Annotated[
        float,
        typer.Option(min=0, metavar="HOURS", help="Only what nobody has used for so long."),
    ] = 24.0,
    json: Json = False,
    home: Home = None,
) -> None:
    """Remove workspaces and environments that no task needs any more.

    Those of tasks that are not over stay in any case. Tasks that are over keep their own copy.
    """
    from fireflyer.cli import workspacing

    workspacing.prune(home, older_than, json=json)
