"""Allreduce between the hosts of a lab: bytes on the wire, and time against the line rate.

A lab's hosts are network namespaces on this machine, joined by links of limited speed. The line
rate is the payload rate of one raw TCP stream of the tensor's size between two hosts, in the same
round. In an allreduce of S bytes among H hosts, each host must send 2S(H-1)/H bytes. Therefore an
allreduce with a float32 wire takes at least the time of these bytes at the line rate. The hosts'
network cards count the bytes, including headers and acknowledgements.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.hosts import Area, Place
from fireflyer.bench.harness.options import WIRES, size_text
from fireflyer.bench.harness.ranks import Run, Timing, interleave
from fireflyer.bench.harness.report import Row

RAW, OURS, GLOO = "raw TCP", "hfreduce", "gloo"


@dataclass(frozen=True)
class Spec:
    """Options of the benchmark.

    Attributes:
        rate: speed of each cable, in the lab's notation.
        sizes: sizes of the float32 tensor, in bytes.
        wires: names from `options.WIRES`, measured in addition to the float32 wire.
        orders: names from `options.ORDERS`; see `Area`.
    """

    hosts: int
    ranks_per_host: int
    rate: str
    sizes: tuple[int, ...]
    wires: tuple[str, ...]
    orders: tuple[str, ...]
    rounds: int


@dataclass
class Measured:
    """Results of one size and order, by candidate, with one value per round.

    Attributes:
        sent: bytes per call of the host that sends most.
    """

    timings: dict[str, list[Timing]]
    sent: dict[str, list[float]]


def run(spec: Spec) -> list[Row]:
    """Measures every order in a separate lab.

    Raises:
        LabError: no root, no iproute2, or an invalid rate.
        FireflyerError: a rank failed.
    """
    rows = []
    for order in spec.orders:
        with Area.in_lab(spec.hosts, spec.rate, spec.ranks_per_host, order) as area:
            results = area.run(lambda place: {n: _measure(spec, place, n) for n in spec.sizes})
        for size, measured in results.items():
            rows += _rows(spec, order, size, measured)
    return rows


def _measure(spec: Spec, place: Place, size: int) -> Measured:
    tensor = hfreduce.empty(size // 4, dtype=torch.float32).zero_()
    plain = torch.zeros(size // 4)
    allreduce: Any = hfreduce.allreduce
    runs: dict[str, Run] = {RAW: place.raw_run(size)}
    sent: dict[str, list[float]] = {}
    calls: dict[str, Callable[[], object]] = {
        OURS: partial(dist.all_reduce, tensor),
        GLOO: partial(dist.all_reduce, plain, dist.ReduceOp.SUM, place.session.gloo),
        **{wire: partial(allreduce, tensor, wire=wire) for wire in spec.wires},
    }
    for name, call in calls.items():
        runs[name], sent[name] = place.counted(call)
    timings = interleave(runs, spec.rounds, least=1)
    return Measured(timings, {name: list_[-spec.rounds :] for name, list_ in sent.items()})


def _rows(spec: Spec, order: str, size: int, measured: Measured) -> list[Row]:
    h = spec.hosts
    bound = 2 * size * (h - 1) / h
    case = f"{h}x{spec.ranks_per_host} {order}, {size_text(size)}"
    raw = [timing.wall / 1e3 for timing in measured.timings[RAW]]
    at_line_rate = [ms * bound / size for ms in raw]
    ours = [timing.wall / 1e3 for timing in measured.timings[OURS]]
    rows = []
    for name in (OURS, *spec.wires):
        share = WIRES[name] / 4 if name != OURS else 1.0
        what = "float32 wire" if name == OURS else f"{name} wire"
        bytes_goal = goals.NIC_BYTES if name == OURS else None
        bounds = [bound * share]
        rows.append(
            Row.of_times(
                f"{case}, {what}, sent by a host", "B", measured.sent[name],
                "2S(H-1)/H" if name == OURS else f"2S(H-1)/H x {share:g}", bounds, bounds, bytes_goal,
            )
        )  # fmt: skip
        walls = [timing.wall / 1e3 for timing in measured.timings[name]]
        limits = [ms * share for ms in at_line_rate]
        time_goal = goals.LINE_RATE if name == OURS and _is_asked(size) else None
        rows.append(
            Row.of_times(
                f"{case}, {what}, wall", "ms", walls, "line rate", limits, limits, time_goal
            )
        )
        if name != OURS:
            rows.append(
                Row.of_times(
                    f"{case}, {what}, wall", "ms", walls, "float32 wire", ours, (),
                    goals.wire(name, size),
                )
            )  # fmt: skip
    theirs = [timing.wall / 1e3 for timing in measured.timings[GLOO]]
    goal = goals.flat_gloo(h, spec.ranks_per_host, order, size)
    rows.append(Row.of_times(f"{case}, float32 wire, wall", "ms", ours, GLOO, theirs, (), goal))
    cpus = [timing.cpu / 1e3 for timing in measured.timings[OURS]]
    their_cpus = [timing.cpu / 1e3 for timing in measured.timings[GLOO]]
    rows.append(Row.of_times(f"{case}, float32 wire, CPU", "ms", cpus, GLOO, their_cpus))
    return rows


def _is_asked(size: int) -> bool:
    return size in (16 << 20, 64 << 20)
