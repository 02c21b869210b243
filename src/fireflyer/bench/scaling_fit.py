"""The costs of `scaling_model`, found by measuring collectives between the hosts of a lab, and memory."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.bench.scaling_model import BUCKET_BYTES, Costs, programs
from fireflyer.bench.train_place import Area, Place
from fireflyer.lab.hosts import Lab

SIZES = (4 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20)
HOSTS = (2, 4)
MEMORY_BYTES = 16 << 20
CALLS = 5
TURNS = 8


class Sample(NamedTuple):
    """An allreduce of one rank a host."""

    hosts: int
    size: int
    seconds: float


def fit(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Seconds of a call, a hop and a byte on the line, none below 0; least squares of relative errors.

    Which program a call ran follows from the costs, and they from it: a few turns settle both.
    """
    ways = [programs(sample.size, sample.hosts) for sample in samples]
    found = _solve(samples, [way[0] for way in ways])
    for _ in range(TURNS):
        _, hop, byte = found
        shortest = [min(way, key=lambda one: one[0] * hop + one[1] * byte) for way in ways]
        found = _solve(samples, shortest)
    return found


def _solve(
    samples: Sequence[Sample], ways: Sequence[tuple[int, float]]
) -> tuple[float, float, float]:
    seconds = np.array([sample.seconds for sample in samples])
    columns = np.array([(1.0, hops, sent) for hops, sent in ways])
    found = np.zeros(3)
    kept = [0, 1, 2]
    while kept:
        scaled = columns[:, kept] / seconds[:, None]
        solution = np.linalg.lstsq(scaled, np.ones(len(samples)), rcond=None)[0]
        if (solution >= 0).all():
            found[kept] = solution
            break
        kept.remove(kept[int(solution.argmin())])
    return float(found[0]), float(found[1]), float(found[2])


def measure(rate: str, say: Callable[[str], None]) -> Costs:
    """In labs of two and four hosts, and on this host.

    Raises:
        LabError: no root, no iproute2, or a rate that is none.
    """
    samples: list[Sample] = []
    for hosts in HOSTS:
        say(f"costs: {hosts} hosts")
        with Lab(hosts, rate) as lab, tempfile.TemporaryDirectory() as folder:
            walls = Area(lab, 1, folder).train(_allreduces)
        samples += [Sample(hosts, size, wall) for size, wall in walls.items()]
    say("costs: memory")
    with tempfile.TemporaryDirectory() as folder:
        memory_s, copy_s, optimizer_s = Area(None, 2, folder).train(_memory)
    call_s, message_s, byte_s = fit(samples)
    return Costs(
        byte_s=byte_s,
        message_s=message_s,
        call_s=call_s,
        memory_byte_s=memory_s / (2 * MEMORY_BYTES),
        copy_byte_s=copy_s / MEMORY_BYTES,
        optimizer_byte_s=optimizer_s / MEMORY_BYTES,
    )


def _allreduces(place: Place) -> dict[int, float]:
    """Seconds by size."""
    found = {}
    for size in SIZES:
        tensor = hfreduce.empty(size // 4, dtype=torch.float32).zero_()
        found[size] = _seconds(place, partial(dist.all_reduce, tensor))
    return found


def _memory(place: Place) -> tuple[float, float, float]:
    """Of MEMORY_BYTES: an allreduce of two ranks of a host; a copy into buckets with their check; SGD."""
    tensor = hfreduce.empty(MEMORY_BYTES // 4, dtype=torch.float32).zero_()
    gradients = torch.zeros(MEMORY_BYTES // 4)
    parameters = torch.zeros(MEMORY_BYTES // 4)
    buckets = list(
        zip(tensor.split(BUCKET_BYTES // 4), gradients.split(BUCKET_BYTES // 4), strict=True)
    )

    def copy() -> None:
        for bucket, gradient in buckets:
            bucket.copy_(gradient)
            bucket.sum().isfinite()

    reduce_s = _seconds(place, partial(dist.all_reduce, tensor))
    copy_s = _seconds(place, copy)
    return reduce_s, copy_s, _seconds(place, lambda: parameters.add_(gradients, alpha=-0.1))


def _seconds(place: Place, call: Callable[[], object]) -> float:
    walls = [place.session.time(call, CALLS, first=call).wall for _ in range(CALLS)]
    return statistics.median(walls) / 1e6
