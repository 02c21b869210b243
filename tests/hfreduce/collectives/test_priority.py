"""Prioritised operations: the same order on all ranks, whatever each has seen when it decides."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init

import fireflyer.hfreduce as hfreduce
from fireflyer.errors import CollectiveError


def order_of(group: Any) -> list[int]:
    """The numbers of the operations in the order in which they ran."""
    records = [r for r in group.flight_records() if r["started_ns"]]
    return [r["number"] for r in sorted(records, key=lambda r: r["started_ns"])]


@pytest.mark.parametrize(("world", "nodes"), [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_higher_priorities_run_first_and_alike_everywhere(
    start_gang: Callable[..., Any], store_path: str, world: int, nodes: int
) -> None:
    """Rank 0, which chooses, has made six when it first does so, and rank 1 lacks the highest of them; then
    rank 0 makes no more until the last rank has made all."""

    def body(rank: int, world: int) -> list[int]:
        group = init(store_path, rank, world)
        made = dist.FileStore(store_path + "-made", world)
        tensors = [torch.full((5_000 + i,), float(i)) for i in range(12)]
        if rank == 1:
            made.get("5 by 0")
        first = dist.all_reduce(torch.ones(1_000_000), async_op=True)  # ends once rank 1 is here
        assert first is not None
        works = []
        for index, tensor in enumerate(tensors):
            if rank == 1 and index == 2:
                first.wait()
            if rank == 0 and index == 6 and world > 2:
                made.get(f"11 by {world - 1}")
            priority = 1 + index % 4 if index < 8 else 0
            works.append(hfreduce.allreduce(tensor, priority=priority, async_op=True))
            made.set(f"{index} by {rank}", "")
        for work in [first, *works]:
            work.wait()
        for index, tensor in enumerate(tensors):
            assert bool((tensor == float(index * world)).all())
        return order_of(group)

    first, *others = start_gang(body, world, nodes).results()
    assert all(order == first for order in others)
    assert sorted(first) == list(range(13))
    assert first[0] == 0
    if world > 1:
        assert first[1] == 4, "the first with the highest priority"
    assert first[9:] == [9, 10, 11, 12], "nothing passes what has no priority"


def test_a_queue_that_all_see_runs_by_priority(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> list[int]:
        group = init(store_path, rank, world)
        store = dist.FileStore(store_path + "-ready", world)
        blocker = None
        if rank == 0:
            blocker = dist.all_reduce(torch.ones(10), async_op=True)  # waits for rank 1
        else:
            store.get("queued")
            blocker = dist.all_reduce(torch.ones(10), async_op=True)
        works = [hfreduce.allreduce(torch.ones(10), priority=p, async_op=True) for p in (1, 3, 2)]
        if rank == 0:
            store.set("queued", "1")
        assert blocker is not None
        for work in [blocker, *works]:
            work.wait()
        return order_of(group)

    # Rank 0 settles the order, and it had seen all three before the first could end.
    assert start_gang(body, 2).results() == [[0, 2, 3, 1]] * 2


def test_a_broken_group_writes_its_flight_record(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIREFLYER_FLIGHT_DIR", str(tmp_path / "flight"))

    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        dist.all_reduce(torch.ones(10))
        for _ in range(2):
            with pytest.raises(CollectiveError):
                dist.all_reduce(torch.ones(20 + rank))

    start_gang(body, 2).results()
    files = sorted((tmp_path / "flight").glob("*.json"))
    assert len(files) == 2, "one a rank"
    for rank, file in enumerate(files):
        record = json.loads(file.read_text())
        assert record["rank"] == rank
        assert record["world"] == 2
        states = [o["state"] for o in record["operations"]]
        assert states == ["done", "failed"]
        assert f"allreduce #1({20 + rank} x float32, sum)" == record["operations"][1]["call"]
        assert "20 x" in record["error"]
        assert "21 x" in record["error"]


@pytest.mark.parametrize("priority", ["1", 1.5, 2**31, -(2**31) - 1])
def test_a_priority_that_is_none_is_refused(
    start_gang: Callable[..., Any], store_path: str, priority: Any
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        with pytest.raises(ValueError, match="priority"):
            hfreduce.allreduce(torch.ones(3), priority=priority, async_op=True)

    start_gang(body, 1).results()


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        hfreduce.empty(2, -1)
