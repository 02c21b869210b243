"""Options of `fireflyer run`."""

from pathlib import Path
from typing import Annotated

import typer

RESOURCES = "Nodes and GPUs"
CODE = "Code and environment"
FAULTS = "Faults"
SCHEDULING = "Scheduling"
"""Panels of `run --help`."""

NodesOption = Annotated[
    int | None,
    typer.Option("--nodes", "-n", min=1, rich_help_panel=RESOURCES, help="Nodes. [default: 1]"),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks", "-r", min=1, rich_help_panel=RESOURCES, help="Ranks on each node. [default: 1]"
    ),
]
WorkspaceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=CODE,
        help="Ship this folder and run in a copy of it: editing it later changes nothing. "
        "Files that a .gitignore excludes are left out.",
    ),
]
LimitOption = Annotated[
    int,
    typer.Option(
        "--workspace-limit",
        min=1,
        max=4096,
        metavar="MIB",
        rich_help_panel=CODE,
        help="Maximum size of the workspace.",
    ),
]
VenvLockOption = Annotated[
    Path | None,
    typer.Option(
        "--venv-lock",
        metavar="FILE",
        rich_help_panel=CODE,
        help="Run in an environment with these packages: a requirements file with hashes. "
        "Made once, shared by all tasks.",
    ),
]
RehearseOption = Annotated[
    str | None,
    typer.Option(
        "--rehearse",
        metavar="EVENT,...",
        rich_help_panel=FAULTS,
        help="Inject faults and suspends on this machine, and report their effects: suspend, "
        "kill-rank1, kill-node1, freeze-rank0, slow-node2 or resume, each with @60s or "
        "@step40; freeze and slow also with +10s.",
    ),
]
ProfOption = Annotated[
    str | None,
    typer.Option(
        "--prof",
        metavar="KEY=VALUE,...",
        help="Profile the first attempt from its first step, e.g. "
        "time=120,recorders=basic,phase,trace=1; also warmup and rate. Results: beside the logs "
        "and on the task's page.",
    ),
]

# -- the ranks -------------------------------------------------------------------------------------

NameOption = Annotated[str, typer.Option(help="Display name; default: the script's.")]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        "-e",
        metavar="K[=V]",
        rich_help_panel=CODE,
        help="Environment of the ranks; K alone: the value in this environment.",
    ),
]
StartOption = Annotated[
    str,
    typer.Option(
        metavar="auto|fork|exec",
        rich_help_panel=CODE,
        help="fork: from a process with torch imported; exec: a fresh interpreter; "
        "auto: fork where the script imports torch.",
    ),
]

# -- fault handling --------------------------------------------------------------------------------

MaxRestartsOption = Annotated[
    int,
    typer.Option(min=0, rich_help_panel=FAULTS, help="Maximum number of restarts after faults."),
]
MaxNodeFaultsOption = Annotated[
    int,
    typer.Option(
        min=0,
        rich_help_panel=FAULTS,
        help="Maximum number of restarts after faults of nodes and network.",
    ),
]
WatchdogOption = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        rich_help_panel=FAULTS,
        help="Treat a rank as hung after TIME without output or heartbeat, e.g. 30m.",
    ),
]
ElasticOption = Annotated[
    bool,
    typer.Option(
        "--elastic",
        rich_help_panel=FAULTS,
        help="Continue without lost ranks, and start replacements for them.",
    ),
]
GraceOption = Annotated[
    float,
    typer.Option(
        min=0, metavar="SECONDS", rich_help_panel=FAULTS, help="Seconds to save and exit on stop."
    ),
]

# -- scheduling ------------------------------------------------------------------------------------

GpusOption = Annotated[
    str,
    typer.Option(
        metavar="[TYPE:]N",
        rich_help_panel=RESOURCES,
        help="GPUs of each node, e.g. 2 or a100:2; 0: whole nodes.",
    ),
]
MemoryOption = Annotated[
    str,
    typer.Option(
        "--memory",
        "--mem",
        metavar="SIZE",
        rich_help_panel=RESOURCES,
        help="Memory of each node, e.g. 64GiB: reserved, and the limit of the ranks there.",
    ),
]
CpusOption = Annotated[
    int,
    typer.Option(
        "--cpus",
        "--cpus-per-task",
        min=0,
        metavar="N",
        rich_help_panel=RESOURCES,
        help="Limit of the cores that the ranks of a node use together; 0: none.",
    ),
]
PriorityOption = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        rich_help_panel=SCHEDULING,
        help="low, normal, above_normal, high, very_high, extreme_high, or auto: "
        "the highest with quota left.",
    ),
]
GroupOption = Annotated[
    str, typer.Option(rich_help_panel=SCHEDULING, help="Group, for quotas and reservations.")
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="K=V",
        rich_help_panel=SCHEDULING,
        help="Label shown to users; may be repeated.",
    ),
]
ExpectOption = Annotated[
    str,
    typer.Option(
        metavar="DURATION",
        rich_help_panel=SCHEDULING,
        help="Expected run time, e.g. 90m; helps backfill and `why`.",
    ),
]
