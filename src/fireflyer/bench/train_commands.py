"""The commands of `fireflyer bench` about training. Torch is imported inside, after the options are read."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.bench import options
from fireflyer.bench.command_line import JsonTo, Rounds, layouts_of, names_of, report, say, teller
from fireflyer.bench.report import Machine


def train(
    only: Annotated[
        str, typer.Option(help="stub, gpt, vgg (minutes, 16 GB), host, memory")
    ] = ",".join(options.TRAIN),
    layouts: Annotated[
        str, typer.Option(help="hosts x ranks a host of stub and gpt, e.g. 2x1,2x2,4x1")
    ] = "2x1",
    of: Annotated[str, typer.Option(help="who trains in stub, gpt and host: ddp, fsdp")] = ",".join(
        options.TRAIN_FAMILIES
    ),
    rate: Annotated[str, typer.Option(help="speed of each cable, e.g. 1gbit")] = "1gbit",
    shape: Annotated[
        str,
        typer.Option(help="of the stub's layers: even, or those of a GPT of as many parameters"),
    ] = "even",
    rounds: Rounds = 5,
    steps: Annotated[int, typer.Option(min=1, help="timed steps of a candidate's turn")] = 3,
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="write the rows that have goals as a table of Markdown"),
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """Training steps of data parallelism.

    Against torch DDP and FSDP2 over gloo, the same work alone, and the line's rate, between the hosts of a
    lab (root). stub and vgg compute by sleeping, as if on a device; host and memory run on this host alone.

    \b
    fireflyer bench train --layouts 2x1,2x2,4x1 --table table.md
    fireflyer bench train --only stub --of fsdp
    fireflyer bench train --only host --json train.json
    """
    machine = Machine.here()
    cases = names_of("--only", only, options.TRAIN)
    families = names_of("--of", of, options.TRAIN_FAMILIES)
    if shape not in options.TRAIN_SHAPES:
        raise typer.BadParameter(f"--shape: {shape!r} is none of {', '.join(options.TRAIN_SHAPES)}")
    from fireflyer.bench import train as bench
    from fireflyer.bench.train_table import goal_table

    spec = bench.Spec(
        cases=cases,
        layouts=layouts_of(layouts),
        families=families,
        rate=rate,
        rounds=rounds,
        steps=steps,
        shape=shape,
    )
    rows = bench.run(spec, teller())
    say("")
    if table is not None:
        table.write_text(goal_table(rows))
    report("train", machine, rows, [], json_to)


def wire(
    work: Annotated[
        Path, typer.Option(metavar="DIR", help="where the data set is made, or found again")
    ] = Path("bench-wire"),
    text: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="text to train on; default: Python's standard library"),
    ] = None,
    steps: Annotated[int, typer.Option(min=25, help="of each run")] = 500,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="where the curves go, as SVG")
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """The loss of a small GPT on real text with low-bit wires, against the float32 wire.

    Two ranks, each named a host of its own, so that gradients take the wire; no root. Minutes.

    \b
    fireflyer bench wire --plot docs/haiscale-wire.svg --json wire.json
    """
    machine = Machine.here()
    from fireflyer.bench import train_wire as bench

    found = bench.run(bench.Spec(work, text, steps), teller())
    say("")
    if plot is not None:
        plot.write_text(bench.plot(found))
    report("wire", machine, bench.rows(found), [], json_to)


def scaling(
    layouts: Annotated[
        str, typer.Option(help="hosts x ranks a host at which steps are measured")
    ] = "2x1,2x2,4x1",
    rate: Annotated[str, typer.Option(help="speed of each cable, e.g. 1gbit")] = "1gbit",
    rounds: Rounds = 3,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="where Figures 8a and 8b go, as SVG")
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """A model of weak scaling: its costs measured in a lab (root), its steps against the lab's.

    \b
    fireflyer bench scaling --plot docs/haiscale-scaling.svg --json scaling.json
    """
    machine = Machine.here()
    wanted = layouts_of(layouts)
    from fireflyer.bench import scaling as bench

    costs, rows = bench.run(bench.Spec(wanted, rate, rounds), teller())
    say("")
    if plot is not None:
        plot.write_text(bench.figures(costs))
    report("scaling", machine, rows, [], json_to)
