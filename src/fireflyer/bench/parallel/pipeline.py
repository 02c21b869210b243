"""Pipelines between the hosts of a lab: step times against the schedule's prediction, and against
torch's pipelining over gloo.

A lab's hosts are network namespaces on this machine. A stage computes by sleeping, as if on a
device. The prediction is the schedule's timeline with nominal times of computations. A predicted
message takes the time of its bytes at the measured rate of one raw TCP stream.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from fireflyer.bench.harness import goals
from fireflyer.bench.harness.hosts import Area, Place
from fireflyer.bench.harness.ranks import Run, Timing, interleave
from fireflyer.bench.harness.report import Row
from fireflyer.bench.parallel.stub import PEERS, Stub, criterion, peer_step
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.pipeline import (
    GPipe,
    Interleaved1F1B,
    PipeDream,
    ZeroBubble,
    make_subgroups,
    partition,
    schedules,
)
from fireflyer.haiscale.pipeline.executor import Pipeline
from fireflyer.haiscale.pipeline.schedules import Schedule, Span
from fireflyer.haiscale.planner.costs import calibrated, card_bytes
from fireflyer.haiscale.planner.costs import plan as price
from fireflyer.haiscale.planner.page import Drawing
from fireflyer.haiscale.planner.presets import CLUSTERS, PAPER, Layout

KINDS: dict[str, type[Pipeline]] = {
    kind.kind: kind for kind in (GPipe, PipeDream, Interleaved1F1B, ZeroBubble)
}
RAW_BYTES = 8 << 20
BYTES_HOSTS, BYTES_RANKS_PER_HOST, BYTES_STAGES, BYTES_WIDTH = 2, 4, 2, 256
CALL_BYTES = 48  # header of a collective call on a link (native/hfreduce/types.hpp: Call)
MASK_BYTES = 1  # one byte per parameter of a stage: True if its backward reached the parameter


@dataclass(frozen=True)
class Load:
    """Compute time and message size of a stage."""

    name: str
    forward_s: float
    message: int


COMPUTE = Load("compute-bound", 0.04, 128 << 10)
NETWORK = Load("communication-bound", 0.002, 1 << 20)


@dataclass(frozen=True)
class Spec:
    """Options of the benchmark.

    Attributes:
        stages: numbers of hosts, each with one rank.
        rate: speed of each cable, in the lab's notation.
        chunks: number of micro-batches of a step.
    """

    stages: tuple[int, ...] = (2, 4)
    rate: str = "1gbit"
    chunks: int = 8
    rounds: int = 5
    loads: tuple[Load, ...] = (COMPUTE, NETWORK)


@dataclass
class Measured:
    """Results of rank 0.

    Attributes:
        line: payload bytes per second of a raw stream.
        spans: computations of one step, by schedule.
    """

    line: float
    timings: dict[str, list[Timing]]
    spans: dict[str, list[Span]] = field(default_factory=dict)


def run(spec: Spec, say: Callable[[str], None]) -> tuple[list[Row], list[Drawing]]:
    """Measures all schedules in labs.

    Raises:
        LabError: no root, no iproute2, or an invalid rate.
        FireflyerError: a rank failed.
    """
    rows: list[Row] = []
    shown: list[Drawing] = []
    for stages in spec.stages:
        for load in spec.loads:
            say(f"{stages} stages, {load.name}")
            with Area.in_lab(stages, spec.rate) as area:
                found = area.run(partial(_measure, spec, load))
            rows += _rows(spec, stages, load, found)
            shown += _shown(spec, stages, load, found)
    for placement in ("staggered", "compact"):
        say(f"bytes on a card, {placement}")
        with Area.in_lab(BYTES_HOSTS, spec.rate, BYTES_RANKS_PER_HOST) as area:
            rows += _bytes_rows(placement, area.run(partial(_sent, placement)))
    return rows + planner_rows(), shown


def planner_rows() -> list[Row]:
    """Compares the planner's step times with the paper's; skips the points used for calibration."""
    rows = []
    for name, (_, *points) in PAPER.items():
        model = calibrated(name)
        for gpus, measured in points:
            layout = Layout(pp=model.pp, dp=gpus // model.pp)
            planned = price(model, CLUSTERS["fire-flyer"], layout).step_s
            case = f"planner, {name}, {gpus} GPUs"
            times = ("planned", planned), ("paper", measured)
            rows.append(Row.of_errors(case, *times, *goals.PLANNER_ERROR_PERCENT))
    return rows


def _plan(kind: str, stages: int, chunks: int) -> Schedule:
    return schedules.schedule(kind, stages, chunks, 2 if kind == schedules.INTERLEAVED else 1)


def predicted(plan: Schedule, load: Load, line: float) -> list[Span]:
    """Returns the predicted timeline of a step; `line` is the rate of messages in bytes per second."""
    each = schedules.costs(load.forward_s, load.forward_s, load.forward_s)
    return schedules.timeline(plan, each, lambda _: load.message / line)


def _measure(spec: Spec, load: Load, place: Place) -> Measured:
    session, size = place.session, place.session.ranks
    line = place.line(RAW_BYTES)
    x = torch.zeros(spec.chunks, load.message // 4)
    runs: dict[str, Run] = {}
    steps: dict[str, Callable[[], object]] = {}
    pipes: dict[str, Pipeline] = {}
    for kind, make in KINDS.items():
        parts = 2 if kind == schedules.INTERLEAVED else 1
        net = nn.Sequential(*(Stub(load.forward_s) for _ in range(size * parts)))
        stages = partition(net, session.rank, size, num_model_chunks=parts)
        pipes[kind] = make(stages, spec.chunks, outputs="none")
        labels = torch.zeros(len(x))
        steps[kind] = partial(pipes[kind].forward_backward, x, criterion=criterion, labels=labels)
        runs[kind] = partial(session.time, steps[kind])
        if kind in PEERS:
            mine = stages if parts > 1 else [stages]
            theirs = peer_step(kind, mine, session.gloo, x, spec.chunks)
            runs[f"torch {kind}"] = partial(session.time, theirs)
    timings = interleave(runs, spec.rounds, least=1)
    spans = {kind: _watched(place, pipe, steps[kind]) for kind, pipe in pipes.items()}
    return Measured(line, timings, spans)


def _watched(place: Place, pipe: Pipeline, step: Callable[[], object]) -> list[Span]:
    """Returns the computations of a step on all ranks. Times count from the first computation's
    start."""
    mine: list[Span] = []
    place.session.barrier()
    pipe.watch = lambda action, begin, end: mine.append(Span(place.rank, action, begin, end))
    step()
    pipe.watch = None
    told: list[list[Span]] = [[] for _ in range(place.session.ranks)]
    dist.all_gather_object(told, mine, group=place.session.gloo)
    zero = min(span.begin for spans in told for span in spans)
    return [s._replace(begin=s.begin - zero, end=s.end - zero) for spans in told for s in spans]


def _shown(spec: Spec, stages: int, load: Load, found: Measured) -> list[Drawing]:
    shown = []
    for kind, measured in found.spans.items():
        planned = predicted(_plan(kind, stages, spec.chunks), load, found.line)
        title = f"{kind}, {stages} ranks, {spec.chunks} micro-batches, {load.name}"
        shown.append(Drawing(title, {"planned": planned, "measured": measured}))
    return shown


def _rows(spec: Spec, stages: int, load: Load, found: Measured) -> list[Row]:
    rows = []
    message = f"{load.message >> 10} KiB, {load.forward_s * 1e3:g} ms a forward"
    for kind in KINDS:
        case = f"{kind}, {stages} stages, {message}"
        ours = [timing.wall / 1e3 for timing in found.timings[kind]]
        spans = predicted(_plan(kind, stages, spec.chunks), load, found.line)
        least = [max(span.end for span in spans) * 1e3]
        goal = goals.PIPELINE_PREDICTED if load is COMPUTE else (None, None)
        rows.append(Row.of_times(case, "ms", ours, "prediction", least, least, *goal))
        if kind in PEERS:
            theirs = [timing.wall / 1e3 for timing in found.timings[f"torch {kind}"]]
            goal = goals.PIPELINE_TORCH[load.name]
            rows.append(Row.of_times(case, "ms", ours, "torch on gloo", theirs, least, *goal))
    return rows


@dataclass
class Sent:
    """Bytes of a step, measured by rank 0.

    Attributes:
        hosts: bytes of messages and collective calls that each host sends.
        card: bytes that the busiest host's card counts, including headers of all layers.
        activations: bytes of activations that a rank sends.
        gradients: bytes of the gradients of a stage.
    """

    hosts: list[float]
    card: float
    activations: float
    gradients: float


def _sent(placement: str, place: Place) -> Sent:
    dp, pp = make_subgroups(pp_size=BYTES_STAGES, placement=placement)
    net = nn.Sequential(
        *(nn.Linear(BYTES_WIDTH, BYTES_WIDTH, bias=False) for _ in range(BYTES_STAGES))
    )
    stage = partition(net, dist.get_rank(pp), BYTES_STAGES)
    pipe = PipeDream(DistributedDataParallel(stage, dp), 4, pp, outputs="none")
    x = torch.randn(64, BYTES_WIDTH)

    def count() -> int:
        crosses = len(pp.hosts) == BYTES_STAGES  # type: ignore[attr-defined]
        reduced: int = dp.network_bytes_sent  # type: ignore[attr-defined]
        return reduced + pipe.mail.sent_bytes * crosses

    def step() -> None:
        pipe.forward_backward(x, criterion=lambda y: y.square().mean())

    # Two steps are not counted: before the second forward, rank 0 broadcasts the final order of the
    # buckets.
    for _ in range(2):
        step()
    place.session.barrier()
    before = count()
    _, card = place.sent_by_a_host(step)
    sent = torch.zeros(len(place.hosts), dtype=torch.float64)
    sent[place.rank // BYTES_RANKS_PER_HOST] = count() - before
    dist.all_reduce(sent, group=place.session.gloo)
    return Sent(sent.tolist(), float(card), x.nbytes, BYTES_WIDTH * BYTES_WIDTH * 4)


def _bytes_rows(placement: str, found: Sent) -> list[Row]:
    """Returns two rows: the sent bytes against the bytes that the planner computes, and the card's
    count against the sent bytes."""
    data = BYTES_HOSTS * BYTES_RANKS_PER_HOST // BYTES_STAGES
    layout = Layout(pp=BYTES_STAGES, dp=data, placement=placement)
    computed, summed = card_bytes(layout, BYTES_RANKS_PER_HOST, found.activations, found.gradients)
    if summed:  # each rank of a host sums a part of the gradients; one rank also sums the mask
        lanes = BYTES_RANKS_PER_HOST // BYTES_STAGES
        computed += BYTES_STAGES * ((lanes + 1) * CALL_BYTES + MASK_BYTES)
    most = max(found.hosts)
    case = f"{BYTES_HOSTS}x{BYTES_RANKS_PER_HOST}, {BYTES_STAGES} stages, {placement}"
    return [
        Row.of_times(
            f"{case}, sent by a host", "B", [most], "as computed", [computed], [computed],
            *goals.PIPELINE_BYTES,
        ),
        Row.of_times(f"{case}, counted by its card", "B", [found.card], "sent", [most]),
    ]  # fmt: skip
