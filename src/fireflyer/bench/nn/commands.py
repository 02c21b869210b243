"""Command `fireflyer bench nn`."""

import os
import sys
from typing import Annotated

import typer

from fireflyer.bench.harness import options
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

HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
"""Settings of glibc's allocator with which large tensors are not mapped anew for each call."""


def nn(
    only: Annotated[
        str, typer.Option(help="Cases: kept, peak, operators, head, bits, digits, characters.")
    ] = ",".join(options.NN_DEFAULT),
    threads: Annotated[str, typer.Option(help="Numbers of torch's threads, e.g. 1,2.")] = "1",
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Measure torch.compile, too (minutes).")
    ] = False,
    scale: Annotated[
        int, typer.Option(min=1, max=64, help="Divide sizes; the goals hold for 1.")
    ] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="Training runs of each kind.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a character model.")] = 1200,
    rounds: Rounds = 9,
    json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Measure the memory that models keep for backward, times of operators, and low-bit training.

    The peer is eager torch, in the same process, with the same allocator: glibc's, set to keep
    memory (MALLOC_MMAP_MAX_=0). The cases digits (needs scikit-learn) and characters take minutes.

    \b
    fireflyer bench nn
    fireflyer bench nn --only operators,head --threads 1,2 --compiled
    fireflyer bench nn --only digits,characters
    """
    if "MALLOC_MMAP_MAX_" not in os.environ:  # glibc reads it when a process starts
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **HEAP})
    machine = Machine.here()
    wanted = names_of("--only", only, options.NN)
    numbers = names_of("--threads", threads, [str(number) for number in range(1, 65)])
    from fireflyer.bench.nn import benchmark as bench

    spec = bench.Spec(wanted, tuple(map(int, numbers)), compiled, scale, seeds, steps, rounds)
    rows = bench.run(spec, progress())
    say("")
    report("nn", machine, rows, [], json=json, output=output)
