"""`fireflyer sim`: its options."""

from pathlib import Path
from typing import Annotated

import typer

TraceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Philly CSV, `sacct --parsable2`, SWF or `fireflyer events --json`.",
    ),
]
GenerateOption = Annotated[
    str | None,
    typer.Option(
        metavar="CLUSTER:JOBS",
        help="Instead: jobs like those of philly, seren, kalos or helios.",
    ),
]
LoadOption = Annotated[
    float,
    typer.Option(
        min=0.01, max=100, help="Of a generated trace: mean demand over the cluster's GPUs."
    ),
]
CompareOption = Annotated[
    str | None, typer.Option(metavar="NAME,NAME...", help="Policies to replay beside it.")
]
NodesOption = Annotated[
    int, typer.Option("--nodes", "-n", min=1, max=100_000, help="Of the cluster.")
]
ZonesOption = Annotated[int, typer.Option(min=1, help="That the nodes are divided into.")]
WholeNodesOption = Annotated[
    bool, typer.Option("--whole-nodes", help="A job takes whole nodes; else some GPUs of each.")
]
UserFromOption = Annotated[
    str | None,
    typer.Option(
        metavar="job|user|group|cluster",
        help="Whose a job is; default: its user, or where the trace has none, each job's own.",
    ),
]
FaultsOption = Annotated[
    str,
    typer.Option(
        metavar="KINDS",
        help="paper, hardware, or of software, nvlink, ecc, gpu, memory, network; "
        "each with a factor if wanted: hardware,software:0.5.",
    ),
]
QuantumOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="timeshare: the shortest; timeshare-fixed: the only one. E.g. 30min.",
    ),
]
FixedQuantumOption = Annotated[
    bool, typer.Option("--fixed-quantum", help="timeshare stands for timeshare-fixed.")
]
EstimatesOption = Annotated[
    float,
    typer.Option(
        min=0,
        help="Run times that the scheduler is told, as a multiple of the true ones; 0: none.",
    ),
]
TickOption = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="Plan at multiples of it only; 0: after each moment's events."
    ),
]
FormOption = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="philly|sacct|swf|events", help="Default: told from the content."
    ),
]


def sim(
    trace: TraceOption = None,
    generate: GenerateOption = None,
    load: LoadOption = 0.8,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="[default: timeshare]")] = None,
    compare: CompareOption = None,
    nodes: NodesOption = 80,
    gpus: Annotated[int, typer.Option(min=1, max=1024, help="Of each node.")] = 8,
    zones: ZonesOption = 1,
    whole_nodes: WholeNodesOption = False,
    user_from: UserFromOption = None,
    faults: FaultsOption = "none",
    quantum: QuantumOption = None,
    fixed_quantum: FixedQuantumOption = False,
    checkpoint_every: Annotated[
        str, typer.Option(metavar="TIME", help="Work between two saves.")
    ] = "5min",
    checkpoint_cost: Annotated[
        str, typer.Option(metavar="TIME", help="By which a save stalls.")
    ] = "200ms",
    suspend_cost: Annotated[
        str, typer.Option(metavar="TIME", help="From the request until the nodes are free.")
    ] = "2s",
    restart_cost: Annotated[
        str, typer.Option(metavar="TIME", help="From each launch until work gets on.")
    ] = "5s",
    estimates: EstimatesOption = 0.0,
    tick: TickOption = "0",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Only the first jobs of the trace.")
    ] = None,
    form: FormOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Of faults and generated traces.")] = 0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="All figures; `-`: stdout.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="A page with plots.")] = None,
) -> None:
    """Replay a trace of jobs under the platform's own scheduler.

    \b
      fireflyer sim --trace jobs.csv --nodes 80
      fireflyer sim --trace sacct.txt --nodes 40 --compare fifo,timeshare --html ab.html
      fireflyer sim --generate seren:20000 --nodes 80 --faults paper

    The same options and seed give the same figures, but for the times that it took.
    """
    from fireflyer.cli.simulating import Asked, simulate

    simulate(
        Asked(
            trace=trace, generate=generate, load=load, policy=policy, compare=compare, nodes=nodes, gpus=gpus,
            zones=zones, whole_nodes=whole_nodes, user_from=user_from, faults=faults, quantum=quantum,
            fixed_quantum=fixed_quantum, checkpoint_every=checkpoint_every, checkpoint_cost=checkpoint_cost,
            suspend_cost=suspend_cost, restart_cost=restart_cost, estimates=estimates, tick=tick, jobs=jobs,
            form=form, seed=seed, json=json, html=html,
        )
    )  # fmt: skip
