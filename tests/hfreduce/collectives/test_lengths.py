"""Lengths that one rank sees otherwise than another: an error everywhere, never a read past a tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import Play, place

from fireflyer.errors import CollectiveError

Wrong = Callable[[int, int, str, Any], Any]
RIGHT, OTHER = 1000, 1007  # elements of all ranks, and of the last one, or of a pair


def _full(count: int, memory: str) -> torch.Tensor:
    return place(torch.full((count,), 1.0), memory)


def _all_gather(rank: int, world: int, memory: str, group: Any) -> None:
    count = OTHER if rank == world - 1 else RIGHT
    outputs = [_full(count, memory) for _ in range(world)]
    dist.all_gather(outputs, _full(count, memory), group=group)


def _all_gather_one_pair(rank: int, world: int, memory: str, group: Any) -> None:
    """Only the last rank's idea of the first one is wrong."""
    outputs = [_full(RIGHT, memory) for _ in range(world)]
    if rank == world - 1:
        outputs[0] = _full(OTHER, memory)
    dist.all_gather(outputs, _full(RIGHT, memory), group=group)


def _all_gather_into_tensor(rank: int, world: int, memory: str, group: Any) -> None:
    count = OTHER if rank == world - 1 else RIGHT
    dist.all_gather_into_tensor(_full(count * world, memory), _full(count, memory), group=group)


def _gather(rank: int, world: int, memory: str, group: Any) -> None:
    outputs = [_full(RIGHT, memory) for _ in range(world)] if rank == 0 else None
    source = _full(OTHER if rank == world - 1 else RIGHT, memory)
    dist.gather(source, outputs, group_dst=0, group=group)


def _all_to_all(rank: int, world: int, memory: str, group: Any) -> None:
    inputs, outputs = ([_full(RIGHT, memory) for _ in range(world)] for _ in range(2))
    if rank == world - 1:
        outputs[0] = _full(OTHER, memory)
    dist.all_to_all(outputs, inputs, group=group)


def _all_to_all_single(rank: int, world: int, memory: str, group: Any) -> None:
    count = world * (OTHER if rank == world - 1 else RIGHT)
    dist.all_to_all_single(_full(count, memory), _full(count, memory), group=group)


WRONG: tuple[Wrong, ...] = (
    _all_gather,
    _all_gather_one_pair,
    _all_gather_into_tensor,
    _gather,
    _all_to_all,
    _all_to_all_single,
)


@pytest.mark.sample(2, 4)
@pytest.mark.parametrize("memory", ["zero-copy", "staged"])
@pytest.mark.parametrize("shape", ["AA", "AABB", "AAB", "AB"])
def test_lengths_that_differ_are_told_to_every_rank(play: Play, shape: str, memory: str) -> None:
    def body(rank: int, world: int) -> list[str]:
        told = []
        for call in WRONG:
            group = dist.new_group(list(range(world)))
            with pytest.raises(CollectiveError) as caught:
                call(rank, world, memory, group)
            with pytest.raises(CollectiveError, match="ranks disagree"):  # the group stays broken
                dist.barrier(group)
            told.append(str(caught.value))
        return told

    for messages in zip(*play(body, shape), strict=True):
        for message in messages:
            assert message.startswith("ranks disagree: in ")
            assert str(RIGHT) in message
            assert str(OTHER) in message


@pytest.mark.parametrize("shape", ["AA", "AB", "AABB"])
def test_a_call_without_an_error_is_not_one_with_other_lengths(play: Play, shape: str) -> None:
    """Lengths that change from call to call in one group, the same on all ranks each time."""

    def body(rank: int, world: int) -> None:
        for k in (3, 0, 5000, 1, 100_000):
            outputs = [torch.zeros(k) for _ in range(world)]
            dist.all_gather(outputs, torch.full((k,), float(rank)))
            assert all(bool((o == r).all()) for r, o in enumerate(outputs))
            dist.gather(torch.full((k,), float(rank)), outputs if rank == 0 else None, dst=0)
            whole = torch.zeros(k * world)
            dist.all_to_all_single(whole, torch.full((k * world,), float(rank)))
            assert all(bool((p == r).all()) for r, p in enumerate(whole.view(world, k)))

    play(body, shape)
