"""Options of `fireflyer run` that say what is shipped, on how many ranks, and what is rehearsed."""

from pathlib import Path
from typing import Annotated

import typer

NodesOption = Annotated[
    int | None, typer.Option("--nodes", "-n", min=1, help="Nodes. [default: 1]")
]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", "-r", min=1, help="Ranks on each node. [default: 1]")
]
WorkspaceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Ship this folder and run in a copy of it: editing it later changes nothing. "
        "What .gitignore files name is left out.",
    ),
]
LimitOption = Annotated[
    int,
    typer.Option("--workspace-limit", min=1, max=4096, metavar="MIB", help="The most it may hold."),
]
VenvLockOption = Annotated[
    Path | None,
    typer.Option(
        "--venv-lock",
        metavar="FILE",
        help="Run in an environment with these packages: a requirements file with hashes. "
        "Made once, shared by all tasks.",
    ),
]
RehearseOption = Annotated[
    str | None,
    typer.Option(
        "--rehearse",
        metavar="EVENT,...",
        help="Make faults and suspends on this machine, and report what became of them: "
        "suspend, kill-rank1, kill-node1, freeze-rank0, slow-node2 or resume, each with @60s or "
        "@step40; freeze and slow also with +10s.",
    ),
]
