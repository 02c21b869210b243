"""Measured costs of training steps: the network link between two hosts of a lab, collective calls,
and work in memory.

A lab's hosts are network namespaces on this machine.
"""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.bench.harness.hosts import RAW_BYTES, Area, Place
from fireflyer.haiscale.gradients.bucket_plan import DEFAULT_BUCKET_BYTES
from fireflyer.haiscale.planner.data_parallel import Prices

SMALL_BYTES = 4 << 10  # size of an allreduce whose bytes cost almost nothing
MEMORY_BYTES = 16 << 20
CALLS = 5
MOST_DIRECT = 8  # maximum number of hosts that all send to each other


@dataclass(frozen=True)
class Costs:
    """Costs in seconds.

    Attributes:
        byte_s: seconds per byte on a host's network link.
        message_s: seconds per hop: the latency of a message of any length.
        call_s: seconds per collective call of any size.
        memory_byte_s: seconds per byte that a host with several ranks reduces in memory; the bytes
            of all its ranks count.
        copy_byte_s: seconds per byte of gradients that a rank copies to the place of their
            reduction.
        optimizer_byte_s: seconds per byte of parameters that the optimizer updates.
    """

    byte_s: float
    message_s: float
    call_s: float
    memory_byte_s: float
    copy_byte_s: float
    optimizer_byte_s: float

    def prices(self, hosts: int, ranks_per_host: int) -> Prices:
        """Returns the times of a rank's operations on such hosts."""
        return Prices(
            allreduce=lambda size: self.allreduce(size, hosts, ranks_per_host),
            half=lambda size: self.half(size, hosts, ranks_per_host),
            copy_byte_s=self.copy_byte_s,
            optimizer_byte_s=self.optimizer_byte_s,
        )

    def half(self, size: float, hosts: int, ranks_per_host: int) -> float:
        """Returns the seconds of a reduce-scatter or an all-gather of `size` bytes."""
        rounds = hosts - 1
        line = size * rounds / hosts * self.byte_s + rounds * self.message_s
        return self.call_s + max(line, self._in_memory(size, ranks_per_host) / 2)

    def allreduce(self, size: float, hosts: int, ranks_per_host: int) -> float:
        """Returns the seconds of an allreduce of `size` bytes by the fastest algorithm."""
        line = min(
            hops * self.message_s + sent * self.byte_s for hops, sent in programs(size, hosts)
        )
        return self.call_s + max(line, self._in_memory(size, ranks_per_host))

    def _in_memory(self, size: float, ranks_per_host: int) -> float:
        return size * ranks_per_host * self.memory_byte_s if ranks_per_host > 1 else 0.0


def programs(size: float, hosts: int) -> list[tuple[int, float]]:
    """Returns (hops in sequence, bytes that the busiest host sends) for an allreduce of `size` bytes.

    The algorithms are a ring, a double tree and, for few hosts, direct sends between all hosts: see
    docs/internals/hfreduce-network.md.
    """
    ring = 2 * (hosts - 1), 2 * size * (hosts - 1) / hosts
    tree = 2 * (hosts - 1).bit_length(), 2 * size
    direct = [(1, size * (hosts - 1))] if hosts <= MOST_DIRECT else []
    return [ring, tree, *direct]


def measure(rate: str, say: Callable[[str], None]) -> Costs:
    """Measures the costs in a lab of two hosts and on this host.

    Raises:
        LabError: no root, no iproute2, or an invalid rate.
    """
    say("costs: two hosts")
    with Area.in_lab(2, rate) as area:
        byte_s, message_s, small_s = area.run(_between_hosts)
    say("costs: memory")
    with tempfile.TemporaryDirectory() as folder:
        memory_s, copy_s, optimizer_s = Area(None, 2, folder).run(_in_memory)
    return Costs(
        byte_s=byte_s,
        message_s=message_s,
        call_s=max(small_s - message_s, 0.0),  # two hosts exchange a small tensor in one hop
        memory_byte_s=memory_s / (2 * MEMORY_BYTES),
        copy_byte_s=copy_s / MEMORY_BYTES,
        optimizer_byte_s=optimizer_s / MEMORY_BYTES,
    )


def _between_hosts(place: Place) -> tuple[float, float, float]:
    """Returns seconds per byte of a raw stream, seconds per hop, and seconds of a small allreduce.

    The raw stream is longer than the burst that a traffic shaper lets through. A hop takes half of
    the round trip of one byte.
    """
    assert place.raw is not None
    byte_s = 1 / place.line(RAW_BYTES)
    there_and_back = _seconds(place, partial(place.raw.call, 1))
    tensor = hfreduce.empty(SMALL_BYTES // 4, dtype=torch.float32).zero_()
    return byte_s, there_and_back / 2, _seconds(place, partial(dist.all_reduce, tensor))


def _in_memory(place: Place) -> tuple[float, float, float]:
    """Returns the seconds of three operations on MEMORY_BYTES.

    The operations are an allreduce of two ranks of a host, a copy into buckets that checks each
    bucket for finite values, and a step of SGD.
    """
    tensor = hfreduce.empty(MEMORY_BYTES // 4, dtype=torch.float32).zero_()
    gradients = torch.zeros(MEMORY_BYTES // 4)
    parameters = torch.zeros(MEMORY_BYTES // 4)
    pieces = (one.split(DEFAULT_BUCKET_BYTES // 4) for one in (tensor, gradients))
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
