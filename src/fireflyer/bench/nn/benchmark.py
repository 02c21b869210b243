"""Benchmark of fireflyer.nn: its cases and their sizes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fireflyer.bench.harness.report import Row
from fireflyer.bench.nn import kept, times, training


@dataclass(frozen=True)
class Spec:
    """Options of the benchmark.

    Attributes:
        only: names of cases, from `harness.options.NN`.
        threads: numbers of torch's threads, measured one after the other.
        compiled: True to measure torch.compile, too.
        scale: divisor of sizes; goals hold for 1.
        seeds: number of training runs of each kind.
        steps: number of training steps in the case characters. The case digits trains for a
            hundredth as many epochs.
    """

    only: tuple[str, ...]
    threads: tuple[int, ...] = (1,)
    compiled: bool = False
    scale: int = 1
    seeds: int = 5
    steps: int = 1200
    rounds: int = 9


def run(spec: Spec, said: Callable[[str], None]) -> list[Row]:
    """Measures the cases of `spec`."""
    rows: list[Row] = []
    if "kept" in spec.only:
        said("kept")
        rows += kept.kept(spec.scale)
    if "peak" in spec.only:
        said("peak")
        rows += kept.peaks(spec.scale)
    before = torch.get_num_threads()
    try:
        for threads in spec.threads:
            torch.set_num_threads(threads)
            rows += _timed(spec, threads, said)
    finally:
        torch.set_num_threads(before)
    if "digits" in spec.only:
        rows += training.digits(spec.seeds, max(1, spec.steps // 100), said)
    if "characters" in spec.only:
        rows += training.characters(spec.seeds, spec.steps, said)
    return rows


def _timed(spec: Spec, threads: int, said: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    if "operators" in spec.only:
        shape = (2048 // spec.scale, 4096 // spec.scale)
        rows += times.operators(spec.rounds, threads, spec.compiled, shape, said)
    if "head" in spec.only:
        said(f"head, {threads} threads")
        rows += times.head(spec.rounds, threads, 2048 // spec.scale, 32_768 // spec.scale)
    if "bits" in spec.only:
        said(f"bits, {threads} threads")
        rows += times.bits(spec.rounds, threads, 1024 // spec.scale)
    return rows
