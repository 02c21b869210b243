"""Completion in shells. A shell's completion script calls `fireflyer` with the words typed so far."""

from enum import StrEnum
from typing import Any

PROGRAM, COMPLETE = "fireflyer", "_FIREFLYER_COMPLETE"
"""COMPLETE is the environment variable by which a shell requests completions."""


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion_script(shell: Shell) -> str:
    """Returns the script that the shell runs at its start."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # no __all__

    return get_completion_script(prog_name=PROGRAM, complete_var=COMPLETE, shell=shell)


def register() -> None:
    """Registers the completion formats of these shells with the parser."""
    from typer.completion import completion_init  # type: ignore[attr-defined]  # no __all__

    completion_init()


def task_ids(ctx: Any, incomplete: str) -> list[str]:
    """Returns the ids of tasks that run or wait; an empty list if no server answers."""
    from fireflyer.errors import FireflyerError
    from fireflyer.hai.client import Client

    try:
        lines = Client(ctx.params.get("home")).task_lines(live=True)
    except (FireflyerError, OSError):
        return []
    return [line.id for line in lines if line.id.startswith(incomplete)]
