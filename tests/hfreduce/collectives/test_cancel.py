"""Cancelling what waits: on all ranks or on none, whoever asks."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init

import fireflyer.hfreduce as hfreduce
from fireflyer.errors import Cancelled, ConfigError


def submit(tensors: list[torch.Tensor], priorities: list[int]) -> list[Any]:
    pairs = zip(tensors, priorities, strict=True)
    return [hfreduce.allreduce(tensor, priority=p, async_op=True) for tensor, p in pairs]


def outcome(work: Any) -> str:
    try:
        work.wait()
    except Cancelled as error:
        return f"cancelled {str(error).split()[0]}"
    return "done"


@pytest.mark.parametrize(("world", "nodes", "asks"), [(1, 1, 0), (3, 1, 0), (3, 1, 2), (4, 2, 3)])
def test_what_waits_is_cancelled_everywhere(
    start_gang: Callable[..., Any], store_path: str, world: int, nodes: int, asks: int
) -> None:
    """Rank 0 keeps the queue waiting until it has heard of the wish."""

    def body(rank: int, world: int) -> tuple[list[str], list[float], float, list[str]]:
        group = init(store_path, rank, world)
        signals = dist.FileStore(store_path + "-signals", world)
        tensors = [torch.full((1_000,), 1.0 + rank) for _ in range(3)]
        first = None
        if rank != 0:  # operation 0; the queue goes on when rank 0 comes
            first = dist.all_reduce(torch.ones(10), async_op=True)
            works = submit(tensors, [3, 1, 2])
        if rank == asks != 0:
            works[1].cancel()
            signals.set("asked", "1")
        if rank == 0:
            if asks == 0:
                group.withdraw(2)  # it has no handle yet: the wish is kept
            else:
                signals.get("asked")
            while group._engine.withdrawals() != {2}:
                pass
            first = dist.all_reduce(torch.ones(10), async_op=True)
            works = submit(tensors, [3, 1, 2])
        assert first is not None
        first.wait()
        ends = [outcome(work) for work in works]
        again = torch.ones(4)
        dist.all_reduce(again)  # the group goes on
        states = [record["state"] for record in group.flight_records()]
        return ends, [float(t[0]) for t in tensors], float(again[0]), states

    total = float(sum(range(1, world + 1)))
    for rank, result in enumerate(start_gang(body, world, nodes).results()):
        ends, values, again, states = result
        assert ends == ["done", "cancelled allreduce", "done"]
        assert values == [total, 1.0 + rank, total], "what is cancelled leaves its tensor alone"
        assert again == world
        assert states == ["done", "done", "cancelled", "done", "done"]


@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (4, 2)])
def test_wishes_at_any_time_end_alike_everywhere(
    start_gang: Callable[..., Any], store_path: str, world: int, nodes: int
) -> None:
    def body(rank: int, world: int) -> tuple[list[str], list[float]]:
        init(store_path, rank, world)
        chance = random.Random(rank)
        ends: list[str] = []
        values: list[float] = []
        for _ in range(40):
            tensors = [torch.ones(2_000) for _ in range(8)]
            works = submit(tensors, [1 + i % 3 for i in range(8)])
            for index in chance.sample(range(8), 3):
                works[index].cancel()
            ends += [outcome(work) for work in works]
            values += [float(tensor[0]) for tensor in tensors]
        return ends, values

    first, *others = start_gang(body, world, nodes).results()
    assert all(other == first for other in others)
    for end, value in zip(*first, strict=True):
        assert value == (1.0 if end == "cancelled allreduce" else float(world))
    assert "done" in first[0]


def test_only_what_has_a_priority_can_be_cancelled(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        work: Any = dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(ConfigError, match="priority"):
            work.cancel()
        work.wait()
        late = hfreduce.allreduce(torch.ones(3), priority=1, async_op=True)
        late.wait()
        late.cancel()  # too late: nothing happens
        assert late.is_success()

    start_gang(body, 2).results()
