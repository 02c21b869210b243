"""Commands of `fireflyer bench` for pipelines, tensor and expert parallelism."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.bench.harness.command_line import (
    JsonOption,
    OutputOption,
    Rounds,
    names_of,
    progress,
    report,
    say,
)
from fireflyer.bench.harness.report import Machine

Rate = Annotated[str, typer.Option(help="Speed of each cable, e.g. 1gbit.")]


def experts(
    hosts: Annotated[int, typer.Option(min=2, max=32, help="Number of hosts of the lab.")] = 4,
    ranks_per_host: Annotated[int, typer.Option(min=1, max=16, help="Processes per host.")] = 2,
    rate: Rate = "200mbit",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 256,
    features: Annotated[int, typer.Option(min=1, help="Width of a token.")] = 2048,
    rounds: Rounds = 5,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure dispatch and combine of experts between the hosts of a lab. Needs root.

    Each token uses 8 of 64 experts, in bfloat16; the number of ranks must divide 64. The peer moves
    one copy per token and expert with all_to_all_single over gloo. Also shows loads after
    rebalancing.

    \b
    fireflyer bench experts --output experts.json
    """
    machine = Machine.here()
    if 64 % (hosts * ranks_per_host):
        raise typer.BadParameter(f"{hosts} x {ranks_per_host} ranks do not divide 64 experts")
    from fireflyer.bench.parallel import experts as bench

    spec = bench.Spec(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        rate=rate,
        tokens=tokens,
        features=features,
        rounds=rounds,
    )
    report("experts", machine, bench.run(spec), [], json=json, output=output)


def tensor(
    rate: Rate = "200mbit",
    tokens: Annotated[int, typer.Option(min=1, help="Rows of the input.")] = 256,
    rounds: Rounds = 5,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure MLPs in 4 bits on tensor-parallel ranks between the hosts of a lab. Needs root.

    The layers have the shapes of Llama-70B and Granite-20B, with widths divided by 16. The peer
    gathers and reorders activations between the two layers.

    \b
    fireflyer bench tensor --output tensor.json
    """
    machine = Machine.here()
    from fireflyer.bench.parallel import tensor as bench

    spec = bench.Spec(rate=rate, tokens=tokens, rounds=rounds)
    report("tensor", machine, bench.run(spec), [], json=json, output=output)


def pipeline(
    stages: Annotated[str, typer.Option(help="Numbers of stages; each stage has a host.")] = "2,4",
    chunks: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 8,
    rate: Rate = "1gbit",
    rounds: Rounds = 5,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw all timelines, planned above measured."),
    ] = None,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure pipelines between the hosts of a lab. Needs root.

    Stages compute by sleeping. The peers are the schedule's own prediction and torch's pipelining
    over gloo. Also counts the bytes that a card sends with each placement, and compares the
    planner's step times with the paper's.

    \b
    fireflyer bench pipeline --html timelines.html --output pipeline.json
    """
    machine = Machine.here()
    from fireflyer.bench.parallel import pipeline as bench
    from fireflyer.charts import Section, page
    from fireflyer.haiscale.planner.page import chart

    numbers = names_of("--stages", stages, [str(number) for number in range(2, 17)])
    spec = bench.Spec(tuple(map(int, numbers)), rate=rate, chunks=chunks, rounds=rounds)
    rows, shown = bench.run(spec, progress())
    say("")
    if html is not None:
        about = [f"{spec.chunks} micro-batches, cables of {rate}. {machine}."]
        drawn = Section("Timelines of a step", about, [chart(one) for one in shown])
        html.write_text(page("Pipelines, planned and measured", [drawn]))
    report("pipeline", machine, rows, [], json=json, output=output)
