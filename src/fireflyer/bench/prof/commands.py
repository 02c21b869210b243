"""Command of `fireflyer bench` for the profiler."""

from typing import Annotated

import typer

from fireflyer.bench.harness.command_line import (
    JsonOption,
    OutputOption,
    Rounds,
    progress,
    report,
    say,
)
from fireflyer.bench.harness.report import Machine


def prof(
    seconds: Annotated[
        float, typer.Option(min=0.5, help="Length of each session and of each period without one.")
    ] = 2.0,
    rounds: Rounds = 5,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure the profiler: time to the first row, cost of phases, of sampling and of a trace.

    Sessions and periods without a session take turns on one training process. The peer of the trace
    is torch.profiler on as many steps of the same process, with and without the operators' stacks.

    \b
    fireflyer bench prof --output prof.json
    """
    machine = Machine.here()
    from fireflyer.bench.prof import benchmark as bench

    rows = bench.run(bench.Spec(rounds=rounds, seconds=seconds), progress())
    say("")
    report("prof", machine, rows, [], json=json, output=output)
