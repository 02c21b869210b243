"""Ctrl-C comes out of every wait as KeyboardInterrupt, which `except Exception` does not catch."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init, meet
from tests.interrupts import interrupted
from torch import nn

from fireflyer.errors import RankFailed
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.fsdp import FullyShardedDataParallel

StartGang = Callable[..., Any]


@pytest.mark.parametrize("shape", ["AA", "AB"])
def test_wait_of_what_is_in_flight(
    start_gang: StartGang, shape: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation stays in flight: it is waited for again, and its result is right."""

    def rank_body(rank: int, world: int) -> Any:
        monkeypatch.setenv("FIREFLYER_NODE", shape[rank])
        init(str(tmp_path / "store"), rank, world)
        small, large, message = torch.ones(3), torch.ones(300_000), torch.ones(5)
        seen = []
        for number, tensor in enumerate((small, large, message)):
            if rank == 1:
                meet(str(tmp_path / f"interrupted-{number}"), rank, world)
                if tensor is message:
                    dist.send(tensor + 6, 0)
                else:
                    dist.all_reduce(tensor)
                continue
            receives = tensor is message
            work = dist.irecv(tensor, 1) if receives else dist.all_reduce(tensor, async_op=True)
            assert work is not None
            seen.append(interrupted(work.wait))
            meet(str(tmp_path / f"interrupted-{number}"), rank, world)
            work.wait()
        dist.barrier()
        dist.destroy_process_group()
        return seen, [float(tensor.sum()) for tensor in (small, large, message)]

    first, second = start_gang(rank_body, 2).results()
    assert first == ([True] * 3, [6, 600_000, 35])
    assert second[1][:2] == [6, 600_000]


def all_reduce() -> object:
    return dist.all_reduce(torch.ones(3))


def all_gather() -> object:
    return dist.all_gather_object([None, None], {"a": 1})


def sum_twice() -> None:
    for _ in range(2):
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2, 2]


@pytest.mark.parametrize(("call", "shape"), [(all_reduce, "AA"), (all_gather, "AB")])
def test_synchronous_call(
    start_gang: StartGang,
    call: Callable[[], object],
    shape: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reduction that was cut off cannot be resumed: the other ranks are told who was interrupted.

    They are told at their second operation at the latest: the first may find that the interrupted
    rank had given its part before, and then its result is right.
    """

    def rank_body(rank: int, world: int) -> Any:
        monkeypatch.setenv("FIREFLYER_NODE", shape[rank])
        init(str(tmp_path / "store"), rank, world)
        was = interrupted(call) if rank == 0 else True
        meet(str(tmp_path / "interrupted"), rank, world)
        with pytest.raises(RankFailed, match="rank 0 was interrupted by a signal"):
            sum_twice()
        meet(str(tmp_path / "end"), rank, world)
        return was

    assert start_gang(rank_body, 2).results() == [True, True]


def test_training(start_gang: StartGang, tmp_path: Any) -> None:
    """Out of backward; and, deferred, out of a look at a parameter, which then still gets its step."""

    def rank_body(rank: int, world: int) -> Any:
        init(str(tmp_path / "store"), rank, world)
        core = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(core.parameters(), lr=0.1)
        deferred = DistributedDataParallel(core, optimizer=optimizer)
        seen = []
        if rank == 0:
            deferred(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            seen.append(interrupted(lambda: core.weight.sum()))
        meet(str(tmp_path / "looked"), rank, world)
        if rank == 1:
            deferred(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        weight = core.weight.tolist()
        model = DistributedDataParallel(nn.Linear(3, 1))
        if rank == 0:
            seen.append(interrupted(model(torch.ones(2, 3)).sum().backward))
        meet(str(tmp_path / "backward"), rank, world)
        return seen, weight

    first, second = start_gang(rank_body, 2).results()
    assert first == ([True, True], second[1])


def test_training_of_shards(start_gang: StartGang, tmp_path: Any) -> None:
    """Out of a forward, which can run again; and out of a look at a parameter, which still gets its step."""

    def rank_body(rank: int, world: int) -> Any:
        init(str(tmp_path / "store"), rank, world)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
        model = FullyShardedDataParallel(
            net,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            auto_wrap_policy={nn.Linear},
            reshard_after_forward=False,
        )
        bias: Any = net[1].bias
        optimizer, seen = model.optimizer, list[bool]()
        assert optimizer is not None
        before = model.state_dict(full=True)["1.bias"]
        x = torch.full((1, 4), 1.0 + rank)
        for turn in range(2):
            if rank == 0:
                seen.append(interrupted(lambda: model(x)))
            meet(str(tmp_path / f"forward-{turn}"), rank, world)
            loss = model(x).sum()
            if rank == 0:
                meet(str(tmp_path / f"backward-{turn}"), rank, world)
                loss.backward()
                optimizer.step()
                seen.append(interrupted(bias.sum))
                meet(str(tmp_path / f"looked-{turn}"), rank, world)
            else:
                meet(str(tmp_path / f"backward-{turn}"), rank, world)
                meet(str(tmp_path / f"looked-{turn}"), rank, world)
                loss.backward()
                optimizer.step()
            bias.sum()
        found = model.state_dict(full=True)["1.bias"]
        torch.testing.assert_close(found, before - 2 * 0.1)
        return seen

    assert start_gang(rank_body, 2).results() == [[True] * 4, []]
