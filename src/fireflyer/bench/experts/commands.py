"""Command of `fireflyer bench` for experts served from tiers."""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.bench.harness.command_line import (
    JsonOption,
    OutputOption,
    Rounds,
    progress,
    report,
    sizes_of,
)
from fireflyer.bench.harness.report import Machine


def experts_store(
    size: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Bytes of an expert, at least 17M.")
    ] = "256M",
    work: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the files; removed afterwards.")
    ] = Path("bench-experts"),
    rounds: Rounds = 9,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure switches between experts against raw reads, torch.load and safetensors.

    A switch ends with a usable model: built on the meta device, with its tensors in place and every
    page touched. Cold means not in the page cache, with a full warm tier. Needs disk space for
    eight experts and shared memory for five. Hit rates come from `fireflyer experts sim`.

    \b
    fireflyer bench experts-store --bytes 256M --output experts.json
    """
    machine = Machine.here()
    (parsed,) = sizes_of(size)
    if parsed < 17 << 20:
        raise typer.BadParameter("invalid --bytes: expected at least 17M")
    from fireflyer.bench.experts import switches

    report(
        "experts-store",
        machine,
        switches.run(parsed, work, rounds, progress()),
        [],
        json=json,
        output=output,
    )
