"""Measurement of the candidates of `bench train` on the ranks of an area."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from fireflyer.bench.harness.hosts import Place
from fireflyer.bench.harness.ranks import Run, Timing, interleave
from fireflyer.bench.train.candidates import LOCAL, Trainer, digest
from fireflyer.errors import CollectiveError

RAW = "raw TCP"


@dataclass
class Measured:
    """Results by candidate, with one value per round.

    The values are microseconds per step, and bytes per step that the busiest host sent.

    Attributes:
        line: payload rates of a raw stream in bytes per second; empty without a lab.
    """

    timings: dict[str, list[Timing]]
    sent: dict[str, list[float]]
    line: list[float] = field(default_factory=list)

    def add(self, other: "Measured") -> None:
        """Appends the rounds of another measurement."""
        for name, timings in other.timings.items():
            self.timings.setdefault(name, []).extend(timings)
            self.sent.setdefault(name, []).extend(other.sent[name])
        self.line += other.line


def measure(
    place: Place, trainers: Mapping[str, Trainer], rounds: int, steps: int, raw_bytes: int
) -> Measured:
    """Measures all candidates in turn, and in each round a raw TCP stream of `raw_bytes` bytes; 0: no
    stream."""
    sent: dict[str, list[float]] = {name: [] for name in trainers}
    runs = {name: _run_of(place, trainer, sent[name]) for name, trainer in trainers.items()}
    if raw_bytes:
        runs[RAW] = place.raw_run(raw_bytes)
    timings = interleave(runs, rounds, least=steps)
    line = [raw_bytes / timing.wall * 1e6 for timing in timings.pop(RAW, [])]
    return Measured(timings, {name: counts[-rounds:] for name, counts in sent.items()}, line)


def _run_of(place: Place, trainer: Trainer, sent: list[float]) -> Run:
    """Returns a run of a block of steps; the run appends the busiest host's bytes per step to
    `sent`."""

    def block(steps: int) -> Timing:
        timing = place.session.time(trainer.step, steps, first=trainer.step)
        trainer.settle()
        return timing

    def run(steps: int) -> Timing:
        if not place.hosts:
            return block(steps)
        timing, most = place.sent_by_a_host(partial(block, steps))
        sent.append(most / (steps + 1))
        return timing

    return run


def check(place: Place, trainers: Mapping[str, Trainer]) -> None:
    """Raises CollectiveError if the ranks' parameters differ in any bit. Collective."""
    for name, trainer in trainers.items():
        own = digest(trainer.parameters())
        bounds = torch.tensor([own, -own])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=place.session.gloo)
        if name != LOCAL and bounds[0] != -bounds[1]:
            raise CollectiveError(f"bench train: {name}: the ranks' parameters differ")
