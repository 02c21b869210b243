"""`fireflyer sim`: its options."""

from pathlib import Path
from typing import Annotated

import typer

TraceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Philly CSV, `sacct --parsable2`, SWF or `fireflyer events --json`."
    ),
]
GenerateOption = Annotated[
    str | None,
    typer.Option(
        metavar="CLUSTER:JOBS", help="Instead: jobs like those of philly, seren, kalos or helios."
    ),
]
LoadOption = Annotated[
    float,
    typer.Option(
        min=0.01, max=100, help="Of a generated trace: mean demand over the cluster's GPUs."
    ),
]
PolicyOption = Annotated[str | None, typer.Option(metavar="NAME", help="[default: timeshare]")]
CompareOption = Annotated[
    str | None, typer.Option(metavar="NAME,NAME...", help="Policies to replay beside it.")
]
NodesOption = Annotated[
    int, typer.Option("--nodes", "-n", min=1, max=100_000, help="Of the cluster.")
]
GpusOption = Annotated[int, typer.Option(min=1, max=1024, help="Of each node.")]
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
        metavar="TIME", help="timeshare: the shortest; timeshare-fixed: the only one. E.g. 30min."
    ),
]
FixedQuantumOption = Annotated[
    bool, typer.Option("--fixed-quantum", help="timeshare stands for timeshare-fixed.")
]
CheckpointEveryOption = Annotated[str, typer.Option(metavar="TIME", help="Work between two saves.")]
CheckpointCostOption = Annotated[str, typer.Option(metavar="TIME", help="By which a save stalls.")]
SuspendCostOption = Annotated[
    str, typer.Option(metavar="TIME", help="From the request until the nodes are free.")
]
RestartCostOption = Annotated[
    str, typer.Option(metavar="TIME", help="From each launch until work gets on.")
]
EstimatesOption = Annotated[
    float,
    typer.Option(
        min=0, help="Run times that the scheduler is told, as a multiple of the true ones; 0: none."
    ),
]
QuotaOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WORD=VALUE...",
        help='As `fireflyer quota set`: "user=ada priority=high gpus=16", of user, group, priority, '
        "gpus, nodes. May be given several times.",
    ),
]
WindowOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODE...",
        help='As `fireflyer window add`: "n0-n7 from=36h until=40h", and user=, group= for a '
        "reservation; times since the first submission; 25% are the first nodes. May be given "
        "several times.",
    ),
]
TickOption = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="Plan at multiples of it only; 0: after each moment's events."
    ),
]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Only the first jobs of the trace.")]
FormOption = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="philly|sacct|swf|events", help="Default: told from the content."
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Of faults and generated traces.")]
JsonOption = Annotated[Path | None, typer.Option(metavar="FILE", help="All figures; `-`: stdout.")]
HtmlOption = Annotated[Path | None, typer.Option(metavar="FILE", help="A page with plots.")]


def sim(
    trace: TraceOption = None,
    generate: GenerateOption = None,
    load: LoadOption = 0.8,
    policy: PolicyOption = None,
    compare: CompareOption = None,
    nodes: NodesOption = 80,
    gpus: GpusOption = 8,
    zones: ZonesOption = 1,
    whole_nodes: WholeNodesOption = False,
    user_from: UserFromOption = None,
    faults: FaultsOption = "none",
    quantum: QuantumOption = None,
    fixed_quantum: FixedQuantumOption = False,
    checkpoint_every: CheckpointEveryOption = "5min",
    checkpoint_cost: CheckpointCostOption = "200ms",
    suspend_cost: SuspendCostOption = "2s",
    restart_cost: RestartCostOption = "5s",
    estimates: EstimatesOption = 0.0,
    quota: QuotaOption = None,
    window: WindowOption = None,
    tick: TickOption = "0",
    jobs: JobsOption = None,
    form: FormOption = None,
    seed: SeedOption = 0,
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Replay a trace of jobs under the platform's own scheduler.

    \b
      fireflyer sim --trace jobs.csv --nodes 80
      fireflyer sim --trace sacct.txt --nodes 40 --compare fifo,timeshare --html ab.html
      fireflyer sim --generate seren:20000 --nodes 80 --faults paper
      fireflyer sim --trace jobs.csv --quota "user=ada gpus=64" --window "25% from=36h until=40h"

    The same options and seed give the same figures, but for the times that it took.
    """
    from fireflyer.cli.simulating import Asked, simulate

    simulate(
        Asked(
            trace=trace, generate=generate, load=load, policy=policy, compare=compare, nodes=nodes, gpus=gpus,
            zones=zones, whole_nodes=whole_nodes, user_from=user_from, faults=faults, quantum=quantum,
            fixed_quantum=fixed_quantum, checkpoint_every=checkpoint_every, checkpoint_cost=checkpoint_cost,
            suspend_cost=suspend_cost, restart_cost=restart_cost, estimates=estimates,
            quota=quota or [], window=window or [], tick=tick, jobs=jobs,
            form=form, seed=seed, json=json, html=html,
        )
    )  # fmt: skip
