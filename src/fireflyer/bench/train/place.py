"""Places where the candidates of `bench train` run: ranks on hosts of a lab, or on this host."""

import os
import secrets
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fireflyer import allocator
from fireflyer.bench.collectives.network import RawStream, enter, sent_by_a_host
from fireflyer.bench.harness.ranks import Run, Session, Timing, interleave, on_ranks
from fireflyer.bench.train.candidates import LOCAL, Trainer, digest
from fireflyer.errors import CollectiveError
from fireflyer.lab.hosts import Host, Lab

RAW = "raw TCP"
RAW_BYTES = 64 << 20  # maximum bytes of one raw transfer

T = TypeVar("T")


@dataclass
class Measured:
    """Results by candidate, one value per round.

    They are microseconds per step, and bytes per step that the busiest host sent.

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


@dataclass
class Area:
    """Lab or host on which ranks run, in fresh processes for every call.

    Attributes:
        lab: None: this host.
        folder: folder of the stores through which the ranks meet.
    """

    lab: Lab | None
    ranks_per_host: int
    folder: str
    _secret: str = field(default_factory=lambda: secrets.token_hex(16))
    _times: int = 0

    @property
    def ranks(self) -> int:
        return self.ranks_per_host * (len(self.lab.hosts) if self.lab is not None else 1)

    def train(self, body: Callable[["Place"], T]) -> T:
        """Runs `body` on every rank and returns rank 0's result."""
        self._times += 1
        store = os.path.join(self.folder, f"store{self._times}")

        def on_rank(rank: int) -> T:
            allocator.follow(os.environ)  # the same for all candidates
            with ExitStack() as stack:
                if self.lab is None:
                    return body(Place(stack.enter_context(Session(store, rank, self.ranks))))
                host = enter(self.lab, rank // self.ranks_per_host, self._secret)
                session = stack.enter_context(Session(store, rank, self.ranks))
                raw = RawStream(session, self.ranks_per_host, host, RAW_BYTES)
                return body(Place(session, self.lab.hosts, stack.enter_context(raw)))

        found: Any = on_ranks(self.ranks, on_rank)
        return found  # type: ignore[no-any-return]


@dataclass
class Place:
    """Context of one rank; without hosts there is no line to measure."""

    session: Session
    hosts: list[Host] = field(default_factory=list)
    raw: RawStream | None = None

    @property
    def rank(self) -> int:
        return self.session.rank

    def line(self, size: int) -> float:
        """Returns the payload bytes per second of one raw stream, the same on all ranks."""
        run = self._raw_run(size)
        walls = [run(1).wall for _ in range(4)][1:]
        return size / statistics.median(walls) * 1e6

    def _raw_run(self, size: int) -> Run:
        """Returns a run of one transfer, whatever the number of calls.

        One transfer lasts as long as many calls.
        """
        assert self.raw is not None
        call = partial(self.raw.call, size)
        return lambda _: self.session.time(call, 1)

    def measure(
        self, trainers: Mapping[str, Trainer], rounds: int, steps: int, raw_bytes: int
    ) -> Measured:
        """Measures all candidates in turn, and the line in each round unless `raw_bytes` is 0."""
        sent: dict[str, list[float]] = {name: [] for name in trainers}
        runs = {name: self._run_of(trainer, sent[name]) for name, trainer in trainers.items()}
        if raw_bytes:
            runs[RAW] = self._raw_run(raw_bytes)
        timings = interleave(runs, rounds, least=steps)
        line = [raw_bytes / timing.wall * 1e6 for timing in timings.pop(RAW, [])]
        return Measured(timings, {name: counts[-rounds:] for name, counts in sent.items()}, line)

    def _run_of(self, trainer: Trainer, sent: list[float]) -> Run:
        """Returns a run of a block of steps; it appends the busiest host's bytes per step."""

        def block(steps: int) -> Timing:
            timing = self.session.time(trainer.step, steps, first=trainer.step)
            trainer.settle()
            return timing

        def run(steps: int) -> Timing:
            if not self.hosts:
                return block(steps)
            timing, most = sent_by_a_host(self.session, self.hosts, partial(block, steps))
            sent.append(most / (steps + 1))
            return timing

        return run

    def check(self, trainers: Mapping[str, Trainer]) -> None:
        """Raises CollectiveError if the ranks' parameters differ in any bit. Collective."""
        for name, trainer in trainers.items():
            own = digest(trainer.parameters())
            bounds = torch.tensor([own, -own])
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self.session.gloo)
            if name != LOCAL and bounds[0] != -bounds[1]:
                raise CollectiveError(f"bench train: {name}: the ranks' parameters differ")
