"""Weak scaling beyond this machine: a model with measured costs, checked against lab steps.

The stub of `bench train` (a model whose layers compute by sleeping) is trained in the lab. Its
steps are predicted from the costs of the same run. The model of costs then draws the paper's
Figures 8a and 8b, next to the paper's own numbers.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fireflyer.bench.harness import curves, goals
from fireflyer.bench.harness.hosts import RAW_BYTES, Area, Place
from fireflyer.bench.harness.report import Row
from fireflyer.bench.scaling import costs as scaling_costs
from fireflyer.bench.scaling.costs import Costs
from fireflyer.bench.train import models
from fireflyer.bench.train.candidates import CANDIDATES, LOCAL
from fireflyer.bench.train.place import Measured, measure
from fireflyer.charts.svg import Point
from fireflyer.haiscale.planner.data_parallel import Training, step_s

KINDS = ("ddp", "ZeRO-3")
LOCAL_OF_LINE = (0.45, 1.0)
"""Times of a step's local work, relative to the time that its gradients need on a host's link."""
SIZES = {
    "5.4 M": models.Sizes(vocabulary=4160, width=256, layers=4, heads=4),
    "17.0 M": models.Sizes(),
    "33.7 M": models.Sizes(width=512, layers=8, heads=8),
}
GPT2 = models.Sizes(vocabulary=50257, context=1024, width=1024, layers=24, heads=16)
"""GPT2-medium with a separate head: 405 M parameters."""
RANKS_PER_HOST = 8
"""Ranks per host, as in the paper."""
PAPER = {
    "VGG16, DDP (Figure 8a)": ((32, 1.0), (512, 1 / 0.867)),
    "GPT2-medium, FSDP (Figure 8b)": ((16, 1.0), (128, 0.595 / 0.57)),
}
"""(GPUs, step time relative to that of the fewest GPUs), read from the figures. The paper's text says
scalings of 88 % and 95 %."""
PAPER_TORCH = {
    "VGG16, DDP (Figure 8a)": ((32, 2.0), (512, 2.0 / 0.938)),
    "GPT2-medium, FSDP (Figure 8b)": ((16, 1 / (1 - 0.32)), (128, 1 / (1 - 0.41))),
}
"""The same points for torch, relative to the paper's HaiScale on the fewest GPUs.

For Figure 8a the paper says that HaiScale takes "half the time", and that torch scales by 93.8 %.
For Figure 8b it says that HaiScale saves 32 to 41 % of the time. It does not say which saving
belongs to which number of GPUs.
"""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Spec:
    """Options of the benchmark.

    Attributes:
        layouts: numbers of hosts and ranks per host.
        steps: minimum number of timed steps per turn.
    """

    layouts: tuple[tuple[int, int], ...] = ((2, 1), (2, 2), (4, 1))
    rate: str = "1gbit"
    rounds: int = 3
    steps: int = 3
    sizes: Mapping[str, models.Sizes] = field(default_factory=lambda: SIZES)


def run(spec: Spec, say: Say) -> tuple[Costs, list[Row]]:
    """Measures the costs in the lab and checks how well they predict its steps.

    Raises:
        LabError: no root, no iproute2, or an invalid rate.
        FireflyerError: a rank failed.
    """
    costs = scaling_costs.measure(spec.rate, say)
    rows = _cost_rows(costs)
    for hosts, ranks_per_host in spec.layouts:
        for size in spec.sizes:
            say(f"steps {hosts}x{ranks_per_host}, {size}")
            rows += _check(spec, costs, size, hosts, ranks_per_host)
    return costs, rows


def _cost_rows(costs: Costs) -> list[Row]:
    shown = (
        ("a byte on the line", "ns", costs.byte_s * 1e9),
        ("a hop", "us", costs.message_s * 1e6),
        ("a call", "us", costs.call_s * 1e6),
        ("a byte reduced in memory, a rank", "ns", costs.memory_byte_s * 1e9),
        ("a byte copied into a bucket", "ns", costs.copy_byte_s * 1e9),
        ("a byte of parameters stepped", "ns", costs.optimizer_byte_s * 1e9),
    )
    return [
        Row.of_times(f"cost of {what}", unit, [max(x, 1e-9)], "", ()) for what, unit, x in shown
    ]


def _check(spec: Spec, costs: Costs, size: str, hosts: int, ranks_per_host: int) -> list[Row]:
    layers = models.gpt_layers(spec.sizes[size])
    line_s = 2 * models.payload(layers).whole * (hosts - 1) / hosts * costs.byte_s
    with Area.in_lab(hosts, spec.rate, ranks_per_host) as area:
        pool = models.pool_for(layers, area.ranks)

        def body(place: Place) -> dict[float, Measured]:
            works = {name: models.stub(layers, pool, place.rank) for name in (LOCAL, *KINDS)}
            trainers = {
                name: CANDIDATES[name].build(place.session, work) for name, work in works.items()
            }
            found = {}
            for factor in LOCAL_OF_LINE:
                for work in works.values():
                    models.pace(work, line_s * factor)
                found[factor] = measure(place, trainers, spec.rounds, spec.steps, RAW_BYTES)
            return found

        measured = area.run(body)
    rows = []
    for factor, walls in measured.items():
        local_s = _median_s(walls, LOCAL)
        stepped_s = models.payload(layers).whole * costs.optimizer_byte_s
        training = Training(layers, max(local_s - stepped_s, 1e-6), hosts * ranks_per_host)
        prices = costs.prices(hosts, ranks_per_host)
        for kind in KINDS:
            case = f"{kind} {hosts}x{ranks_per_host}, {size}, local {factor:g} of line"
            times = ("model", step_s(kind, training, prices)), ("lab", _median_s(walls, kind))
            rows.append(Row.of_errors(case, *times, goals.MODEL_ERROR_PERCENT))
    return rows


def _median_s(measured: Measured, name: str) -> float:
    return statistics.median(timing.wall for timing in measured.timings[name]) / 1e6


def figures(costs: Costs) -> str:
    """Returns the paper's Figures 8a and 8b, drawn from the model, as the text of an SVG file."""
    vgg, gpt = PAPER
    panels = [
        _panel(vgg, "ddp", models.vgg_layers(models.Sizes()), (4, 8, 16, 32, 64), costs),
        _panel(gpt, "ZeRO-3", models.gpt_layers(GPT2), (2, 4, 8, 16), costs),
    ]
    return curves.draw("Weak scaling: a model, and the paper's numbers", panels)


def _panel(
    name: str, kind: str, layers: Sequence[models.Layer], hosts: Sequence[int], costs: Costs
) -> curves.Panel:
    shown = [
        curves.Curve(f"model, local {factor:g} x the line time", points)
        for factor, points in modelled(kind, layers, hosts, costs).items()
    ]
    shown += [
        curves.Curve("paper, HaiScale", PAPER[name], dashed=True),
        curves.Curve("paper, torch", PAPER_TORCH[name], dashed=True),
    ]
    axis = f"GPUs, {RANKS_PER_HOST} a host"
    marks = [RANKS_PER_HOST * count for count in hosts]
    unit = "step time over that of HaiScale, or the model, on the fewest"
    return curves.Panel(name, unit, axis, shown, 0.8, 2.4, marks, log=True)


def modelled(
    kind: str, layers: Sequence[models.Layer], hosts: Sequence[int], costs: Costs
) -> dict[float, list[Point]]:
    """Returns points (ranks, step time relative to that of the fewest hosts).

    The key is the time of the local work, divided by the time that a step's bytes need on a host's
    link if there are very many hosts.
    """
    moved = CANDIDATES[kind].moves(models.payload(layers))
    found = {}
    for factor in (0.5, 1.0, 2.0):
        local_s = factor * moved * costs.byte_s
        steps = {
            count: step_s(
                kind,
                Training(layers, local_s, count * RANKS_PER_HOST),
                costs.prices(count, RANKS_PER_HOST),
            )
            for count in hosts
        }
        first = steps[hosts[0]]
        found[factor] = [(float(RANKS_PER_HOST * n), step / first) for n, step in steps.items()]
    return found
