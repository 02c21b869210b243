"""Training commands of `fireflyer bench`. They import torch only after they read the options."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.bench.harness import options
from fireflyer.bench.harness.command_line import (
    JsonOption,
    OutputOption,
    Rounds,
    layouts_of,
    names_of,
    progress,
    report,
    say,
)
from fireflyer.bench.harness.report import Machine


def train(
    only: Annotated[
        str, typer.Option(help="Cases: stub, gpt, vgg (minutes, 16 GB), host, memory.")
    ] = ",".join(options.TRAIN),
    layouts: Annotated[
        str, typer.Option(help="Hosts x ranks per host in stub and gpt, e.g. 2x1,2x2,4x1.")
    ] = "2x1",
    of: Annotated[
        str, typer.Option(help="Wrappers to measure in stub, gpt and host: ddp, fsdp.")
    ] = ",".join(options.TRAIN_FAMILIES),
    rate: Annotated[str, typer.Option(help="Speed of each cable, e.g. 1gbit.")] = "1gbit",
    shape: Annotated[
        str,
        typer.Option(
            help="Layer sizes of the stub: even, or gpt (those of a GPT with as many parameters)."
        ),
    ] = "even",
    rounds: Rounds = 5,
    steps: Annotated[
        int, typer.Option(min=1, help="Timed steps of a candidate in each round.")
    ] = 3,
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the rows with goals to FILE as a Markdown table."),
    ] = None,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure training steps of data parallelism.

    The peers are torch DDP and FSDP2 over gloo, the same work alone, and the line rate, between the
    hosts of a lab (root). stub and vgg compute by sleeping, as if on a device. host and memory run
    on this host alone.

    \b
    fireflyer bench train --layouts 2x1,2x2,4x1 --table table.md
    fireflyer bench train --only stub --of fsdp
    fireflyer bench train --only host --output train.json
    """
    machine = Machine.here()
    cases = names_of("--only", only, options.TRAIN)
    families = names_of("--of", of, options.TRAIN_FAMILIES)
    if shape not in options.TRAIN_SHAPES:
        raise typer.BadParameter(
            f"invalid --shape {shape!r}: expected one of {', '.join(options.TRAIN_SHAPES)}"
        )
    from fireflyer.bench.train import benchmark as bench
    from fireflyer.bench.train.table import goal_table

    spec = bench.Spec(
        cases=cases,
        layouts=layouts_of(layouts),
        families=families,
        rate=rate,
        rounds=rounds,
        steps=steps,
        shape=shape,
    )
    rows = bench.run(spec, progress())
    say("")
    if table is not None:
        table.write_text(goal_table(rows))
    report("train", machine, rows, [], json=json, output=output)


def wire(
    work: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder of the data set; made if missing, else reused."),
    ] = Path("bench-wire"),
    text: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Text to train on; default: Python's standard library."),
    ] = None,
    steps: Annotated[int, typer.Option(min=25, help="Training steps of each run.")] = 500,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the curves to FILE as SVG.")
    ] = None,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Compare the loss of a small GPT with low-bit wires to its loss with the float32 wire.

    The GPT trains on real text. Two ranks run under different host names, so that gradients take
    the wire; no root is needed. The command takes minutes.

    \b
    fireflyer bench wire --plot docs/benchmarks/haiscale-wire.svg --output wire.json
    """
    machine = Machine.here()
    from fireflyer.bench.train import wire as bench

    found = bench.run(bench.Spec(work, text, steps), progress())
    say("")
    if plot is not None:
        plot.write_text(bench.plot(found))
    report("wire", machine, bench.rows(found), [], json=json, output=output)


def scaling(
    layouts: Annotated[
        str, typer.Option(help="Hosts x ranks per host to measure steps at, e.g. 2x1,4x1.")
    ] = "2x1,2x2,4x1",
    rate: Annotated[str, typer.Option(help="Speed of each cable, e.g. 1gbit.")] = "1gbit",
    rounds: Rounds = 3,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write Figures 8a and 8b to FILE as SVG.")
    ] = None,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Model weak scaling: measure costs in a lab (root) and check the model against its steps.

    \b
    fireflyer bench scaling --plot docs/benchmarks/haiscale-scaling.svg --output scaling.json
    """
    machine = Machine.here()
    wanted = layouts_of(layouts)
    from fireflyer.bench.scaling import benchmark as bench

    costs, rows = bench.run(bench.Spec(wanted, rate, rounds), progress())
    say("")
    if plot is not None:
        plot.write_text(bench.figures(costs))
    report("scaling", machine, rows, [], json=json, output=output)
