"""Labels of operations are compared among ranks; a lost rank of a sub-group has both its numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import die, init

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError, RankFailed


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("kind", ["allreduce", "prioritised", "reduce_scatter", "all_gather"])
def test_labels_that_differ(
    start_gang: Callable[..., Any], store_path: str, kind: str, nodes: int
) -> None:
    def call(label: int, world: int) -> torch.Tensor:
        source, output = torch.ones(64 * world), torch.zeros(64)
        if kind == "reduce_scatter":
            hfreduce.reduce_scatter(output, source, label=label)
        elif kind == "all_gather":
            hfreduce.all_gather(source, output, label=label)
        elif kind == "allreduce":
            hfreduce.allreduce(output, label=label)
        else:
            hfreduce.allreduce(output, label=label, priority=1, async_op=True).wait()
        return output

    def body(rank: int, world: int) -> str:
        init(store_path, rank, world)
        for label in (0, 7, 2**64 - 1):
            call(label, world)
        for wrong in (-1, 2**64, "a"):
            with pytest.raises(ValueError, match="invalid label"):
                call(wrong, world)  # type: ignore[arg-type]
        with pytest.raises(CollectiveError) as caught:
            call(3 if rank else 5, world)
        return str(caught.value)

    for said in start_gang(body, 2, nodes).results():
        assert said.startswith("ranks disagree: rank ")
        assert "label 3" in said
        assert "label 5" in said


def test_a_lost_rank_of_a_sub_group(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        pair = dist.new_group([1, 2], backend="hfreduce")
        if rank == 0:
            return None
        dist.all_reduce(torch.ones(1), group=pair)
        if rank == 2:
            die()
        with pytest.raises(RankFailed) as caught:
            dist.all_reduce(torch.ones(1 << 20), group=pair, async_op=True).wait()
        assert caught.value.rank == 1
        return str(caught.value)

    gang = start_gang(body, 3)
    assert gang.result(1).endswith("(rank 2 of the default group)")
