"""Options of `fireflyer sim`."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.options import JsonOption

TraceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Philly CSV, `sacct --parsable2`, SWF or `fireflyer events --json`."
    ),
]
GenerateOption = Annotated[
    str | None,
    typer.Option(
        metavar="CLUSTER:JOBS",
        help="Generate a trace instead: jobs like those of philly, seren, kalos or helios.",
    ),
]
LoadOption = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=100,
        help="Mean demand of a generated trace, relative to the GPUs of the cluster.",
    ),
]
PolicyOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Policy to replay. [default: timeshare]")
]
CompareOption = Annotated[
    str | None,
    typer.Option(metavar="NAME,NAME...", help="Further policies to replay for comparison."),
]
NodesOption = Annotated[
    int, typer.Option("--nodes", "-n", min=1, max=100_000, help="Number of nodes.")
]
GpusOption = Annotated[int, typer.Option(min=1, max=1024, help="GPUs of each node.")]
TypesOption = Annotated[
    str,
    typer.Option(
        metavar="TYPE:NODES,...",
        help="Types of GPUs, each with its number of nodes, e.g. a100:40,v100:40; jobs that ask "
        "for a type get it. Default: one type.",
    ),
]
ZonesOption = Annotated[
    int, typer.Option(min=1, help="Number of zones that the nodes are divided into.")
]
WholeNodesOption = Annotated[
    bool,
    typer.Option(
        "--whole-nodes", help="Give each job whole nodes; default: some GPUs of each node."
    ),
]
UserFromOption = Annotated[
    str | None,
    typer.Option(
        metavar="job|user|group|cluster",
        help="Owner of a job; default: its user; without users in the trace, one owner per job.",
    ),
]
FaultsOption = Annotated[
    str,
    typer.Option(
        metavar="KINDS",
        help="Faults to inject: paper, hardware, or any of software, nvlink, ecc, gpu, memory, "
        "network; each with an optional factor: hardware,software:0.5.",
    ),
]
QuantumOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Quantum: the shortest for timeshare, the only one for timeshare-fixed. E.g. 30min.",
    ),
]
FixedQuantumOption = Annotated[
    bool, typer.Option("--fixed-quantum", help="Replay timeshare as timeshare-fixed.")
]
CheckpointEveryOption = Annotated[str, typer.Option(metavar="TIME", help="Work between two saves.")]
CheckpointCostOption = Annotated[
    str, typer.Option(metavar="TIME", help="Time that a save stalls a job.")
]
SuspendCostOption = Annotated[
    str,
    typer.Option(metavar="TIME", help="Time from the suspend request until the nodes are free."),
]
RestartCostOption = Annotated[
    str, typer.Option(metavar="TIME", help="Time from a launch until the job makes progress.")
]
EstimatesOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=1e6,
        help="Run times given to the scheduler, as a multiple of the true ones; 0: none.",
    ),
]
QuotaOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WORD=VALUE...",
        help='Quota as in `fireflyer quota set`, e.g. "user=ada priority=high gpus=16"; words: '
        "user, group, priority, gpus, nodes. May be repeated.",
    ),
]
WindowOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODE...",
        help='Window as in `fireflyer window add`, e.g. "n0-n7 from=36h until=40h"; user= or '
        "group= makes a reservation. Times count from the first submission; 25% means the "
        "first quarter of the nodes. May be repeated.",
    ),
]
TickOption = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="Plan only at multiples of TIME; 0: after the events of each moment."
    ),
]
JobsOption = Annotated[
    int | None, typer.Option(min=1, help="Replay only the first N jobs of the trace.")
]
FormOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="philly|sacct|swf|events",
        help="Format of the trace; default: detected from the content.",
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of faults and generated traces.")]
OutputOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write all figures as JSON to FILE.")
]
HtmlOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page with plots; `-`: to stdout.")
]


def sim(
    trace: TraceOption = None,
    generate: GenerateOption = None,
    load: LoadOption = 0.8,
    policy: PolicyOption = None,
    compare: CompareOption = None,
    nodes: NodesOption = 80,
    gpus: GpusOption = 8,
    types: TypesOption = "",
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
    json: JsonOption = False,
    output: OutputOption = None,
    html: HtmlOption = None,
) -> None:
    """Replay a trace of jobs under the platform's own scheduler.

    \b
      fireflyer sim --trace jobs.csv --nodes 80
      fireflyer sim --trace sacct.txt --nodes 40 --compare fifo,timeshare --html ab.html
      fireflyer sim --generate seren:20000 --nodes 80 --faults paper
      fireflyer sim --trace jobs.csv --quota "user=ada gpus=64" --window "25% from=36h until=40h"

    The same options and seed give the same figures, except for the measured run times.
    """
    from fireflyer.cli.sim.impl import Asked, simulate

    simulate(
        Asked(
            trace=trace, generate=generate, load=load, policy=policy, compare=compare, nodes=nodes, gpus=gpus,
            types=types, zones=zones, whole_nodes=whole_nodes, user_from=user_from, faults=faults,
            quantum=quantum, fixed_quantum=fixed_quantum, checkpoint_every=checkpoint_every,
            checkpoint_cost=checkpoint_cost, suspend_cost=suspend_cost, restart_cost=restart_cost,
            estimates=estimates, quota=quota or [], window=window or [], tick=tick, jobs=jobs,
            form=form, seed=seed, json=json, output=output, html=html,
        )
    )  # fmt: skip
