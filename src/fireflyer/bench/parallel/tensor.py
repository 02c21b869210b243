"""Pairs of 4-bit layers, split over the hosts of a lab: network namespaces on this machine.

The form without communication between the two layers is compared with the naive form. The naive
form gathers and reorders activations between the layers.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from fireflyer.bench.harness import goals
from fireflyer.bench.harness.hosts import Area, Place
from fireflyer.bench.harness.ranks import Run, Timing, interleave
from fireflyer.bench.harness.report import Row
from fireflyer.haiscale.tensor import QuantizedPair
from fireflyer.nn.quant import quantize

SHAPES = {"Llama-70B": (8192, 28672), "Granite-20B": (6144, 24576)}
GROUP = 32
OURS, NAIVE = "aware", "naive"


@dataclass(frozen=True)
class Spec:
    """Options of the benchmark.

    Attributes:
        ranks: numbers of ranks, each on a separate host.
        rate: speed of each cable, in the lab's notation.
        scale: divisor of both widths of an MLP.
        tokens: number of rows of the input.
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
    for ranks in spec.ranks:
        with Area.in_lab(ranks, spec.rate) as area:
            found = area.run(lambda place: {name: _measure(place, spec, name) for name in SHAPES})
        for shape, measured in found.items():
            rows += _rows(spec, ranks, shape, measured)
    return rows


@torch.no_grad()
def _measure(place: Place, spec: Spec, shape: str) -> Measured:
    width, hidden = (size // spec.scale for size in SHAPES[shape])
    torch.manual_seed(0)
    column = quantize(torch.randn(hidden, width), GROUP, torch.rand(width))
    row = quantize(torch.randn(width, hidden), GROUP, torch.rand(hidden))
    x = torch.randn(spec.tokens, width)
    runs: dict[str, Run] = {}
    sent: dict[str, list[float]] = {}
    for name in (OURS, NAIVE):
        pair = QuantizedPair([column], row, functional.gelu, aware=name == OURS)
        runs[name], sent[name] = place.counted(partial(pair, x))
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
