"""Options and arguments shared by many verbs."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.completion import task_ids
from fireflyer.program import json_option

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="The platform's folder; else $FIREFLYER_HOME, else ~/.local/state/fireflyer.",
    ),
]
JsonOption = Annotated[bool, json_option()]
TasksArgument = Annotated[
    list[str], typer.Argument(metavar="TASK", help="Task ids, e.g. t1.", autocompletion=task_ids)
]
TaskArgument = Annotated[
    str, typer.Argument(metavar="TASK", help="Task id, e.g. t1.", autocompletion=task_ids)
]


def given(context: typer.Context, names: Collection[str]) -> set[str]:
    """Returns the parameters among `names` that the command line sets."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
