"""Tensors without memory of their own are refused with words, by every collective; nothing else ends."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError


def calls(t: torch.Tensor, world: int, rank: int) -> Iterator[Callable[[], Any]]:
    plain = torch.ones(t.shape)
    pieces = [torch.ones(t.shape) for _ in range(world)]
    group: Any = dist.group.WORLD
    yield lambda: dist.all_reduce(t)
    yield lambda: dist.all_reduce(t, async_op=True)
    yield lambda: hfreduce.allreduce(t, priority=1)
    yield lambda: dist.reduce(t, rank)
    yield lambda: dist.reduce(t, 1 - rank)
    yield lambda: dist.broadcast(t, rank)
    yield lambda: dist.broadcast(t, 1 - rank)
    yield lambda: dist.all_gather(pieces, t)
    yield lambda: dist.all_gather([t] * world, plain)
    yield lambda: group._allgather_base(torch.ones(world, *t.shape), t)
    yield lambda: group._allgather_base(t, torch.ones(t.numel() // world))
    yield lambda: dist.gather(t, pieces if rank == 0 else None)
    yield lambda: dist.scatter(t, pieces if rank == 0 else None)
    yield lambda: dist.scatter(plain, [t] * world, src=rank)
    yield lambda: dist.reduce_scatter(t, pieces)
    yield lambda: dist.reduce_scatter(plain, [t] * world)
    yield lambda: hfreduce.reduce_scatter(plain, t)
    yield lambda: group.alltoall(pieces, [t] * world)
    yield lambda: group.alltoall([t] * world, pieces)
    yield lambda: group.alltoall_base(plain, t, [], [])
    yield lambda: dist.send(t, 1 - rank)
    yield lambda: dist.recv(t, 1 - rank)


@pytest.mark.filterwarnings("ignore:Sparse CSC")
def test_tensors_without_memory(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        group: Any = dist.group.WORLD
        mesh = DeviceMesh.from_group(group, "cpu")
        whole = torch.ones(4, 4)
        strange = {
            "a DTensor, (4, 4), has none: pass its .to_local()": distribute_tensor(
                whole, mesh, [Shard(0)], src_data_rank=None
            ),
            "meta device": whole.to("meta"),
            "layout torch.sparse_csc": whole.to_sparse_csc(),
        }
        for words, tensor in strange.items():
            for number, call in enumerate(calls(tensor, world, rank)):
                said = f"call {number} took it"
                try:
                    call()
                except CollectiveError as error:
                    said = str(error)
                assert words in said, (number, words)
        with pytest.raises(CollectiveError, match=r"layout torch\.sparse_coo"):
            dist.broadcast(whole.to_sparse(), 0)
        dist.all_reduce(whole)  # nobody waits for anybody
        dist.all_reduce(torch.ones(0))
        assert bool((whole == world).all())

    start_gang(body, 2).results()
