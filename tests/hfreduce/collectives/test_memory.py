"""What a group holds on to: bounded shared memory, and nothing that grows with the number of operations."""

import contextlib
import gc
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import draws
from tests.hfreduce.conftest import init

import fireflyer.hfreduce as hfreduce

OPERATIONS = int(os.environ.get("FIREFLYER_SOAK_OPERATIONS", 40_000 if draws.full() else 2_000))
MIB = 1 << 20


def shared_bytes() -> int:
    """Bytes of our segments that this process has mapped."""
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:" in line:
                begin, end = line.split()[0].split("-")
                total += int(end, 16) - int(begin, 16)
    return total


def private_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def held() -> dict[str, int]:
    """Bytes of mapped segments, threads, and how many descriptors there are of each kind."""
    kinds: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            name = os.readlink(f"/proc/self/fd/{number}").removesuffix(" (deleted)")
            kinds[name.split(":[")[0]] += (
                1  # a file of pytest's own process may be removed meanwhile
            )
    return {"shared": shared_bytes(), "threads": len(os.listdir("/proc/self/task")), **kinds}


@pytest.mark.sample(1, 1)
@pytest.mark.deadline(3_700)
@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (2, 2), (4, 2)])
def test_operations_leave_nothing_behind(
    start_gang: Callable[..., Any], store_path: str, world: int, nodes: int
) -> None:
    def body(rank: int, world: int) -> tuple[Any, Any, int]:
        group = init(store_path, rank, world)
        zero_copy, staged, large = hfreduce.empty(64), torch.ones(64), torch.ones(400_000)
        parts = [torch.empty(64) for _ in range(world)]

        def some(operations: int) -> None:
            for _ in range(operations // 8):
                dist.all_reduce(zero_copy.fill_(1))
                dist.all_reduce(staged.fill_(1))
                dist.all_gather(parts, staged)
                works = [dist.all_reduce(staged, async_op=True) for _ in range(2)]
                works.append(hfreduce.allreduce(staged, priority=2, async_op=True))
                works.append(dist.broadcast(zero_copy, 0, async_op=True))
                for work in works:
                    work.wait()
                dist.barrier()
            dist.all_reduce(large.fill_(1))
            gc.collect()

        some(2_000)
        before, private = held(), private_bytes()
        some(OPERATIONS)
        after = held()
        dist.barrier()  # whoever ends takes its connections along
        assert len(group.flight_records()) == 256
        return before, after, private_bytes() - private

    for before, after, growth in start_gang(body, world, nodes).results(limit_s=3_600):
        assert after == before
        assert before["shared"] <= (64 + 2 * world) * MIB
        assert growth < MIB, "bytes of the heap that stay"
