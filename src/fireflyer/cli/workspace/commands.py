"""Verbs and options of `fireflyer workspace`. Implementations are imported when a verb runs."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.options import HomeOption, JsonOption

workspace = typer.Typer(
    name="workspace",
    no_args_is_help=False,
    rich_markup_mode=None,
    help="""Look at and remove workspaces of tasks.

\b
  fireflyer run --workspace . train.py    ship this folder, run train.py in the copy
  fireflyer workspace list
  fireflyer workspace pull t1 copy        the workspace of task t1
""",
)

Which = Annotated[
    str,
    typer.Argument(
        metavar="WORKSPACE", help="Task, or the first 6 or more digits of a workspace's id."
    ),
]


@workspace.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@workspace.command("list")
def list_(json: JsonOption = False, home: HomeOption = None) -> None:
    """List workspaces, the most recently used first."""
    from fireflyer.cli.workspace import impl

    impl.list_all(home, json=json)


@workspace.command()
def show(which: Which, json: JsonOption = False, home: HomeOption = None) -> None:
    """List the entries of a workspace: modes, sizes, names."""
    from fireflyer.cli.workspace import impl

    impl.show(home, which, json=json)


@workspace.command()
def pull(
    which: Which,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to create, or an empty folder.")
    ],
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Write a workspace into a folder, with exactly the files that were shipped."""
    from fireflyer.cli.workspace import impl

    impl.pull(home, which, folder, json=json)


@workspace.command()
def prune(
    older_than: Annotated[
        float,
        typer.Option(min=0, metavar="HOURS", help="Remove only what has been unused for HOURS."),
    ] = 24.0,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Remove workspaces and environments that no task needs.

    Workspaces and environments of unfinished tasks always stay. Finished tasks keep their own copy.
    """
    from fireflyer.cli.workspace import impl

    impl.prune(home, older_than, json=json)
