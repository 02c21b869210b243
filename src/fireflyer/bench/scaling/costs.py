"""Measurement of the costs of `model`: a line between hosts of a lab, calls, memory."""

import statistics
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.bench.scaling.model import BUCKET_BYTES, Costs
from fireflyer.bench.train.place import RAW_BYTES, Area, Place
from fireflyer.lab.hosts import Lab

SMALL_BYTES = 4 << 10  # an allreduce whose bytes cost almost nothing
MEMORY_BYTES = 16 << 20
CALLS = 5


def measure(rate: str, say: Callable[[str], None]) -> Costs:
    """Measures the costs in a lab of two hosts and on this host.

    Raises:
        LabError: no root, no iproute2, or an invalid rate.
    """
    say("costs: two hosts")
    with Lab(2, rate) as lab, tempfile.TemporaryDirectory() as folder:
        byte_s, message_s, small_s = Area(lab, 1, folder).train(_between_hosts)
    say("costs: memory")
    with tempfile.TemporaryDirectory() as folder:
        memory_s, copy_s, optimizer_s = Area(None, 2, folder).train(_in_memory)
    return Costs(
        byte_s=byte_s,
        message_s=message_s,
        call_s=max(small_s - message_s, 0.0),  # two hosts exchange a small tensor in one hop
        memory_byte_s=memory_s / (2 * MEMORY_BYTES),
        copy_byte_s=copy_s / MEMORY_BYTES,
        optimizer_byte_s=optimizer_s / MEMORY_BYTES,
    )


def _between_hosts(place: Place) -> tuple[float, float, float]:
    """Returns the seconds per byte of a raw stream, per hop, and of a small allreduce.

    The raw stream is longer than the burst that a shaper lets through. A hop is half of the
    round trip of one byte.
    """
    assert place.raw is not None
    byte_s = 1 / place.line(RAW_BYTES)
    there_and_back = _seconds(place, partial(place.raw.call, 1))
    tensor = hfreduce.empty(SMALL_BYTES // 4, dtype=torch.float32).zero_()
    return byte_s, there_and_back / 2, _seconds(place, partial(dist.all_reduce, tensor))


def _in_memory(place: Place) -> tuple[float, float, float]:
    """Returns the seconds of three operations on MEMORY_BYTES.

    They are an allreduce of two ranks of a host, a copy into buckets with their check, and SGD.
    """
    tensor = hfreduce.empty(MEMORY_BYTES // 4, dtype=torch.float32).zero_()
    gradients = torch.zeros(MEMORY_BYTES // 4)
    parameters = torch.zeros(MEMORY_BYTES // 4)
    pieces = (one.split(BUCKET_BYTES // 4) for one in (tensor, gradients))
    buckets = list(zip(*pieces, strict=True))

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
