"""Training with split layers gives the parameters of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.haiscale.tensor.models import Model, data, init, plan, train, whole, worst
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fireflyer.checkpoint import CheckpointManager
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.tensor import load_optimizer_state, optimizer_state, parallelize

EVERYTHING = slice(None)


def reference() -> tuple[Model, Any]:
    model = Model(0)
    return model, train(model, EVERYTHING, None)


@pytest.mark.parametrize(
    ("ranks", "sequence"),
    [
        (2, False),
        (2, True),
        pytest.param(4, False, marks=pytest.mark.full),
        pytest.param(4, True, marks=pytest.mark.full),
    ],
)
def test_tensor_parallel(
    start_gang: Callable[..., Any], store_path: str, ranks: int, sequence: bool
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        model = Model(rank)
        parallelize(model, plan(sequence))
        assert model.head.weight is model.words.weight, "tied parameters stay tied"
        optimizer = train(model, EVERYTHING, dist.group.WORLD)
        state = model.state_dict()
        moments = optimizer_state(model, optimizer)["state"]
        held = sum(p.numel() for p in model.parameters())
        return whole(state), [whole(moments[n]) for n in sorted(moments)], held

    model, optimizer = reference()
    everything = sum(p.numel() for p in model.parameters())
    for state, moments, held in start_gang(body, ranks).results():
        assert worst(state, model.state_dict()) <= 1e-10
        expected = optimizer.state_dict()["state"]
        assert max(worst(m, expected[n]) for n, m in enumerate(moments)) <= 1e-10
        assert held < everything * (1 / ranks + 0.2)


@pytest.mark.full
def test_tensor_by_data_parallel(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
        core = parallelize(Model(rank), plan(sequence=True), mesh)
        model = DistributedDataParallel(core, process_group=mesh.get_group("dp_replicate"))
        mine = mesh.get_local_rank("dp_replicate")
        train(model, slice(2 * mine, 2 * mine + 2), mesh.get_group("tp"))
        model.settle()
        return whole(model.state_dict())

    expected = reference()[0].state_dict()
    assert all(worst(state, expected) <= 1e-10 for state in start_gang(body, 4).results())


def test_checkpoints_are_of_the_whole_model(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path
) -> None:
    """Two ranks save; one process, and two ranks with fresh parameters, load."""
    folder = tmp_path / "checkpoints"

    def save(rank: int, world: int) -> None:
        init(store_path, rank, world)
        model = Model(rank)
        parallelize(model, plan(sequence=False))
        optimizer = train(model, EVERYTHING, dist.group.WORLD)
        manager = CheckpointManager(str(folder))
        state = {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}
        manager.save(1, state)
        manager.wait()
        state = manager.load()
        fresh = Model(7)
        parallelize(fresh, plan(sequence=False))
        other = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
        fresh.load_state_dict(state["model"])
        load_optimizer_state(fresh, other, state["optimizer"])
        for optimizer_now, model_now in ((optimizer, model), (other, fresh)):
            optimizer_now.zero_grad()
            model_now(data(9)).square().mean().backward()
            optimizer_now.step()
        pairs = zip(model.parameters(), fresh.parameters(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
        with pytest.raises(RuntimeError, match=r"whole parameter \(24, 16\)"):
            fresh.load_state_dict({**state["model"], "words.weight": torch.ones(12, 16)})

    start_gang(save, 2).results()
    loaded: Any = CheckpointManager(str(folder)).load()
    model, optimizer = reference()
    assert worst(loaded["model"], model.state_dict()) <= 1e-10
    torch.optim.AdamW(Model(0).parameters()).load_state_dict(loaded["optimizer"])
    for number, state in optimizer.state_dict()["state"].items():
        assert worst(loaded["optimizer"]["state"][number], state) <= 1e-10


def test_torchs_own_layers_run_beside(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
        x = torch.randn(4, 8, dtype=torch.float64)
        expected = layers(x)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        assert float((layers(x) - expected).detach().abs().max()) <= 1e-12
        model = Model(0)
        parallelize(model, plan(sequence=False), mesh)
        return float((layers(x).square().sum() + model(data(0)).sum()).detach())

    one, two = start_gang(body, 2).results()
    assert one != two, "logits are split"
