"""Random collectives, random deaths: survivors hear of it, and nothing is left behind.

CI runs a few rounds; `make soak` runs FIREFLYER_SOAK_S seconds of them (default half an hour).
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fireflyer.hfreduce as hfreduce
from fireflyer.errors import CollectiveError

ROUNDS = 6


def one_call(chance: random.Random, rank: int, world: int) -> None:
    """The same on all ranks whose `chance` is in the same state."""
    count = chance.choice([1, 1000, 50_000, 400_000])
    zero_copy = chance.random() < 0.5
    tensor = hfreduce.empty(count).fill_(rank) if zero_copy else torch.full((count,), float(rank))
    total = world * (world - 1) / 2
    match chance.randrange(6):
        case 0 | 1:
            dist.all_reduce(tensor)
            assert tensor[-1] == total
        case 2:
            works = [dist.all_reduce(t, async_op=True) for t in tensor.chunk(4)]
            for work in works:
                assert work is not None
                work.wait()
            assert tensor[0] == total
        case 3:
            root = chance.randrange(world)
            dist.broadcast(tensor, src=root)
            assert tensor[-1] == root
        case 4:
            gathered = [torch.empty(count) for _ in range(world)]
            dist.all_gather(gathered, tensor)
            assert [float(g[-1]) for g in gathered] == list(range(world))
        case _:
            received = torch.empty(count)
            requests = [
                dist.isend(tensor, (rank + 1) % world),
                dist.irecv(received, (rank - 1) % world),
            ]
            for request in requests:
                assert request is not None
                request.wait()
            assert received[-1] == (rank - 1) % world


def play(path: str, seed: int, rank: int, world: int, victim: int) -> str:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)
    chance = random.Random(seed)
    end = chance.randrange(5, 60)
    for number in range(1000):
        if rank == victim and number == end:
            os._exit(9)  # as by SIGKILL: no goodbye
        try:
            one_call(chance, rank, world)
        except CollectiveError as error:
            return str(error)
    return "went on"


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@contextmanager
def nothing_is_left() -> Iterator[None]:
    files, before = len(os.listdir("/proc/self/fd")), children()
    yield
    assert len(os.listdir("/proc/self/fd")) <= files
    assert children() <= before, "ranks that nobody waited for"


@pytest.mark.deadline(int(os.environ.get("FIREFLYER_SOAK_S", "60")) + 480)
def test_random_deaths(start_gang: Callable[..., Any], tmp_path: Path) -> None:
    seconds = float(os.environ.get("FIREFLYER_SOAK_S", "0"))
    start, round_number = time.monotonic(), 0
    while round_number < ROUNDS or time.monotonic() - start < seconds:
        seed = round_number
        chance = random.Random(~seed)
        world = chance.randint(2, 5)
        nodes = chance.randint(1, min(world, 3))
        victim = chance.randrange(world)

        def body(rank: int, world: int, seed: int = seed, victim: int = victim) -> str:
            return play(str(tmp_path / f"store{seed}"), seed, rank, world, victim)

        with nothing_is_left():
            gang = start_gang(body, world, nodes)
            ends = [gang.result(rank) for rank in range(world)]
            gang.close()
        for rank, end in enumerate(ends):
            if rank == victim:
                assert end is None
            else:
                assert isinstance(end, str), (seed, rank, end)
                assert f"rank {victim}" in end, (seed, rank, end)
        round_number += 1
