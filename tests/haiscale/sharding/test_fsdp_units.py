"""Units of a sharded model: ranks that run other ones are told; parts that freeze; inference first."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fireflyer.errors import CollectiveError
from fireflyer.haiscale.fsdp import FullyShardedDataParallel

SGD = partial(torch.optim.SGD, lr=0.1)
LINEAR = ModuleWrapPolicy({nn.Linear})


def init(path: str, rank: int, world: int) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


class Either(nn.Module):
    """Two layers of one size. Forward runs one of them, or both with a gradient to one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, first: bool, both: bool) -> torch.Tensor:
        if not both:
            x = self.a(x) if first else self.b(x)
            return x
        a, b = self.a(x), self.b(x)
        x = a + b.detach() if first else a.detach() + b
        return x


@pytest.mark.sample(4)
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("case", ["gather", "reduce", "replicate"])
def test_ranks_that_run_other_units(
    start_gang: Callable[..., Any], store_path: str, case: str, defers: bool
) -> None:
    def body(rank: int, world: int) -> str:
        init(store_path, rank, world)
        rows = [[0], [1]]
        model = FullyShardedDataParallel(
            Either(),
            optimizer=SGD if defers else None,
            auto_wrap_policy=LINEAR,
            reshard_after_forward=False,
            mesh=DeviceMesh("cpu", rows) if case == "replicate" else None,
        )

        def step() -> None:
            x = torch.ones(2, 8, requires_grad=True)  # else all is reduced at the end, in one order
            model(x, rank == 0, case != "gather").sum().backward()
            model.settle()

        with pytest.raises(CollectiveError) as caught:
            step()
        return str(caught.value)

    for said in start_gang(body, 2).results():
        what = {"gather": "all_gather", "reduce": "reduce_scatter", "replicate": "allreduce"}[case]
        assert f"rank 0 calls {what}" in said
        assert "unit 'a'" in said
        assert "unit 'b'" in said
        assert "all ranks must run the same units in the same order" in said


@pytest.mark.parametrize("defers", [False, True])
def test_parts_of_a_unit_freeze_and_thaw(
    start_gang: Callable[..., Any], store_path: str, defers: bool
) -> None:
    def run(core: nn.Sequential, model: nn.Module, optimizer: Any) -> list[list[float]]:
        for step in range(6):
            core[0].requires_grad_(step not in (1, 2))
            core[1].weight.requires_grad_(step != 4)
            model(torch.full((2, 8), 0.5 + step, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state: Any = model.state_dict
        whole = state(full=True) if isinstance(model, FullyShardedDataParallel) else state()
        return [t.flatten().tolist() for t in whole.values()]

    def make() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()

    def body(rank: int, world: int) -> list[list[float]]:
        init(store_path, rank, world)
        core = make()
        model = FullyShardedDataParallel(core, optimizer=SGD if defers else None)
        return run(core, model, model.optimizer or SGD(model.parameters()))

    alone = make()
    wanted = run(alone, alone, SGD(alone.parameters()))
    for found in start_gang(body, 2).results():
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("policy", [None, LINEAR])
def test_inference_before_training(
    start_gang: Callable[..., Any], store_path: str, policy: ModuleWrapPolicy | None
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), auto_wrap_policy=policy
        )
        optimizer = SGD(model.parameters())
        x = torch.ones(2, 8)
        with torch.inference_mode():
            before = model(x)
        assert before.is_inference()
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            with torch.inference_mode():
                after = model(x)
            assert float(after.sum()) < float(before.sum())
            before = after

    start_gang(body, 2).results()
