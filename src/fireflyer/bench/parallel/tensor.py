"""Pairs of 4-bit layers between the hosts of a lab: without a gather against the naive form."""

import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from fireflyer.bench.collectives.network import enter, sent_by_a_host
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.ranks import Run, Session, Timing, interleave, on_ranks
from fireflyer.bench.harness.report import Row
from fireflyer.haiscale.tensor import QuantizedPair
from fireflyer.lab.hosts import Lab
from fireflyer.nn.quant import quantize

SHAPES = {"Llama-70B": (8192, 28672), "Granite-20B": (6144, 24576)}
GROUP = 32
OURS, NAIVE = "aware", "naive"


@dataclass(frozen=True)
class Spec:
    """Options of the benchmark.

    Attributes:
        ranks: numbers of ranks, each on a host of its own.
        rate: speed of each cable, in the lab's notation.
        scale: divisor of both widths of an MLP.
        tokens: rows of the input.
    """

    ranks: tuple[int, ...] = (2, 4)
    rate: str = "200mbit"
    scale: int = 16
    tokens: int = 256
    rounds: int = 5


Measured = tuple[dict[str, list[Timing]], dict[str, list[float]]]


def run(spec: Spec) -> list[Row]:
    """Measures each shape on each number of ranks.

    Raises:
        LabError: no root, no iproute2, or an invalid rate.
        FireflyerError: a rank failed.
    """
    rows = []
    secret = secrets.token_hex(16)
    for ranks in spec.ranks:
        with Lab(ranks, spec.rate) as lab, tempfile.TemporaryDirectory() as folder:
            body = partial(_rank, spec, ranks, lab, secret, os.path.join(folder, "store"))
            found: dict[str, Measured] = on_ranks(ranks, body)
        for shape, measured in found.items():
            rows += _rows(spec, ranks, shape, measured)
    return rows


def _rank(
    spec: Spec, ranks: int, lab: Lab, secret: str, store: str, rank: int
) -> dict[str, Measured]:
    enter(lab, rank, secret)
    with Session(store, rank, ranks) as session, torch.no_grad():
        return {name: _measure(session, spec, lab, name) for name in SHAPES}


def _measure(session: Session, spec: Spec, lab: Lab, shape: str) -> Measured:
    width, hidden = (size // spec.scale for size in SHAPES[shape])
    torch.manual_seed(0)
    column = quantize(torch.randn(hidden, width), GROUP, torch.rand(width))
    row = quantize(torch.randn(width, hidden), GROUP, torch.rand(hidden))
    x = torch.randn(spec.tokens, width)
    sent: dict[str, list[float]] = {OURS: [], NAIVE: []}

    def counted(call: Callable[[], object], into: list[float]) -> Run:
        def act(calls: int) -> Timing:
            timing, most = sent_by_a_host(session, lab.hosts, partial(session.time, call, calls))
            into.append(most / calls)
            return timing

        return act

    runs = {
        name: counted(partial(QuantizedPair([column], row, functional.gelu, aware=aware), x), into)
        for (name, into), aware in zip(sent.items(), (True, False), strict=True)
    }
    timings = interleave(runs, spec.rounds, least=1)
    return timings, {name: values[-spec.rounds :] for name, values in sent.items()}


def _rows(spec: Spec, ranks: int, shape: str, measured: Measured) -> list[Row]:
    timings, sent = measured
    hidden = SHAPES[shape][1] // spec.scale
    gather = [float(spec.tokens * hidden * 4 * (ranks - 1) // ranks)]
    case = f"{shape} / {spec.scale}, {ranks} ranks"
    saved = [naive - ours for ours, naive in zip(sent[OURS], sent[NAIVE], strict=True)]
    ours, naive = ([t.wall / 1e3 for t in timings[name]] for name in (OURS, NAIVE))
    return [
        Row.of_speeds(
            f"{case}, saved by a host", "B", saved, "(R-1)/R of the gather", gather, gather,
            goals.TENSOR_SAVED,
        ),
        Row.of_times(f"{case}, wall", "ms", ours, NAIVE, naive, (), *goals.TENSOR_TIME),
    ]  # fmt: skip
