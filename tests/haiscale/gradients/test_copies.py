"""Copies of a wrapped model: what torch's wrapper allows gives the same values; what has no copy says so."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init, meet
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel

from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.expert import MoE
from fireflyer.haiscale.fsdp import FullyShardedDataParallel
from fireflyer.haiscale.pipeline import GPipe, partition
from fireflyer.haiscale.tensor import Column, QuantizedPair, Row, parallelize
from fireflyer.nn.quant import quantize

StartGang = Callable[..., Any]
SGD = partial(torch.optim.SGD, lr=0.1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def wrapped(kind: str, group: Any = None) -> tuple[Any, torch.optim.Optimizer]:
    module = net()
    optimizer = SGD(module.parameters())
    if kind == "torch":
        return nn.parallel.DistributedDataParallel(module, process_group=group), optimizer
    used = optimizer if kind == "deferred" else None
    return DistributedDataParallel(module, group, optimizer=used), optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.arange(12.0).double().view(4, 3).cos() * (1 + number) + dist.get_rank()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def pickled(model: nn.Module) -> Any:
    data = io.BytesIO()
    torch.save(model, data)
    data.seek(0)
    return torch.load(data, weights_only=False)


def script(kind: str) -> list[torch.Tensor]:
    """Every way to copy, the copies and the original then trained on; returns all their values."""
    model, optimizer = wrapped(kind)
    train(model, optimizer, 0)
    averaged = AveragedModel(model)
    for number in (1, 2):
        train(model, optimizer, number)
        averaged.update_parameters(model)
    copies = [copy.deepcopy(model), pickled(model), pickle.loads(pickle.dumps(model))]
    own = [SGD(other.parameters()) for other in copies]
    for number in (3, 4, 5):
        for other, its_own in zip(copies, own, strict=True):
            train(other, its_own, 2 * number)
        train(model, optimizer, number)
    assert all(one.grad is None for one in model.parameters()) is (kind == "deferred")
    models = [model, averaged, *copies]
    return [t.clone() for one in models for t in (*one.parameters(), *one.buffers())]


@pytest.mark.parametrize("kind", ["synchronous", "deferred"])
def test_copies_train_as_those_of_torchs_wrapper(
    start_gang: StartGang, store_path: str, kind: str
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        ours, theirs = script(kind), script("torch")
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(one, other, msg=f"tensor {number}: {one}, not {other}")
        return True

    assert start_gang(body, 2).results() == [True, True]


def test_a_copy_reduces_with_the_group_of_its_model(start_gang: StartGang, store_path: str) -> None:
    """A copy of one rank alone is made without the others. torch's wrapper cannot be copied here."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        pair = dist.new_group([0, 1], backend="hfreduce")
        dist.new_group([2], backend="hfreduce")
        if rank == 2:
            return True
        model, optimizer = wrapped("deferred", pair)
        train(model, optimizer, 0)
        if rank == 0:
            AveragedModel(model)
        meet(store_path, rank, 2)
        other = copy.deepcopy(model)
        second = copy.copy(model)
        assert second.module is model.module
        assert second.reducer is model.reducer
        train(other, SGD(other.parameters()), rank)
        with pytest.raises(RuntimeError, match="Pickling/Unpickling"):
            copy.deepcopy(wrapped("torch", pair)[0])
        with pytest.raises(ConfigError, match="process_group= or levels= cannot be pickled"):
            pickle.dumps(model)
        return [one.tolist() for one in other.parameters()]

    first, second, _ = start_gang(body, 3).results()
    assert first == second


def models_without_copies() -> list[nn.Module]:
    mesh = init_device_mesh("cpu", (1,))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    elastic = net()
    weights = [quantize(torch.ones(8, 8), 8) for _ in range(3)]
    pair = QuantizedPair(weights[:2], weights[2], between=torch.mul, mesh=mesh)
    return [
        FullyShardedDataParallel(net(), optimizer=SGD),
        DistributedDataParallel(elastic, optimizer=SGD(elastic.parameters()), elastic=True),
        GPipe(partition(layers, 0, 1), 1),
        parallelize(copy.deepcopy(layers), {"0": Column(), "1": Row()}, mesh),
        MoE(4, 4, 2, 1),
        pair,
    ]


def test_models_without_copies_say_so(start_gang: StartGang, store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        ways: list[Callable[[nn.Module], Any]] = [
            copy.deepcopy,
            pickle.dumps,
            pickled,
            AveragedModel,
        ]
        for model in models_without_copies():
            assert copy.copy(model).state_dict().keys() == model.state_dict().keys()
            for way in ways:
                with pytest.raises(ConfigError, match="cannot be copied or pickled"):
                    way(model)
        return True

    assert start_gang(body, 1).results() == [True]
