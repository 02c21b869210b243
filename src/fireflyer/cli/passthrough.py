"""Pass-through verbs: separate programs, which receive all remaining arguments, also --help."""

import os
import sys
from typing import Any

import typer

from fireflyer.program import need_directory

PASS_THROUGH: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


def hand_over(app: typer.Typer, verb: str, text: str, *program: str) -> None:
    """Adds a verb to `app` that executes `python -m PROGRAM...`: a module and its arguments."""

    def become(context: typer.Context) -> None:
        need_directory()
        _become([sys.executable, "-P", "-m", *program, *context.args])

    become.__doc__ = text
    app.command(name=verb, context_settings=PASS_THROUGH, add_help_option=False)(become)


def _become(command: list[str]) -> None:
    sys.stdout.flush()
    os.execv(command[0], command)
