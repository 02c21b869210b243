"""Ranks that do not agree are told what differs; models that change are followed."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel


def init(path: str, rank: int, world: int) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


def refusal(module: nn.Module, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        DistributedDataParallel(module, **options)
    return str(caught.value)


def test_ranks_with_different_models(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        said = [refusal(nn.Linear(3, 4 if rank < 2 else 5))]
        said.append(refusal(nn.Linear(3, 4).to(torch.float64 if rank == 1 else torch.float32)))
        said.append(refusal(nn.Linear(3, 4, bias=rank == 1)))
        layer = nn.Linear(3, 4)
        if rank == 0:
            layer.bias.requires_grad_(False)
        said.append(refusal(layer))
        return said

    for shape, dtype, bias, frozen in start_gang(body, 3).results():
        assert (
            "rank 0 has parameter weight (4, 3) torch.float32, rank 2 has parameter weight (5, 3)"
            in shape
        )
        assert "rank 1 has parameter weight (4, 3) torch.float64" in dtype
        assert "only rank 1 has parameter bias (4,)" in bias
        assert "rank 0 has parameter bias (4,) torch.float32 frozen, rank 1 has" in frozen
        assert "ranks [1, 2] differ from rank 0" in frozen


def test_modules_that_cannot_be_trained_so(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        return [
            refusal(nn.Sequential(nn.Embedding(3, 4, sparse=True))),
            refusal(nn.Sequential(nn.LazyLinear(3))),
            refusal(nn.Linear(2, 2).requires_grad_(False)),
            refusal(nn.ReLU()),
            refusal(nn.ParameterList([torch.ones(2, dtype=torch.complex64)])),
            refusal(nn.Linear(2, 2), wire="int3"),
        ]

    sparse, lazy, frozen, nothing, complex_, wire = start_gang(body, 1).results()[0]
    assert "0 makes sparse gradients" in sparse
    assert "0.weight has no shape yet" in lazy
    assert "no parameter requires a gradient" in frozen
    assert "no parameter requires a gradient" in nothing
    assert "0 is torch.complex64" in complex_
    assert "int3" in wire


@pytest.mark.parametrize("defers", [False, True])
def test_parameters_come_and_freeze(
    start_gang: Callable[..., Any], store_path: str, defers: bool
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
        optimizer = torch.optim.SGD(core.parameters(), lr=1.0)
        model = DistributedDataParallel(core, optimizer=optimizer if defers else None)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.full((1, 2), float(rank))).sum().backward()
            optimizer.step()

        step()
        torch.manual_seed(rank)
        core.append(nn.Linear(2, 1, bias=False))
        optimizer.add_param_group({"params": core[1].parameters(), "lr": 0.5})
        step()
        core[0].requires_grad_(False)
        before = core[0].weight.tolist()
        step()
        assert core[0].weight.tolist() == before
        core[0].requires_grad_(True)
        step()
        assert core[0].weight.tolist() != before
        return [p.tolist() for p in core.parameters()]

    first, second = start_gang(body, 2).results()
    assert first == second


def test_a_model_that_changes_on_one_rank_only(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = DistributedDataParallel(core)
        core[rank].bias.requires_grad_(False)
        with pytest.raises(ConfigError) as caught:
            model(torch.ones(1, 2))
        return str(caught.value)

    for said in start_gang(body, 2).results():
        assert "rank 0 has parameter 0.bias (2,) torch.float32 frozen" in said


def test_a_static_graph_that_is_none(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

        class Pick(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = core

            def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
                result: torch.Tensor = self.layers[which](x)
                return result

        model = DistributedDataParallel(Pick(), static_graph=True)
        for _ in range(3):
            model(torch.ones(1, 2), which=0).sum().backward()
        before = model.reducer.times.reductions
        with pytest.raises(CollectiveError, match=r"layers.1.weight") as caught:
            model(torch.ones(1, 2), which=1).sum().backward()
        return str(caught.value), before

    assert len(start_gang(body, 2).results()) == 2


def test_gradients_that_are_not_finite(
    start_gang: Callable[..., Any], store_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = DistributedDataParallel(core)
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("fireflyer").addHandler(handler)
        x = torch.ones(1, 2)
        y = core[0](x)
        loss = core[1](y.detach()).sum() + y.sum() * (float("nan") if rank else 1.0)
        model(x)
        loss.backward()
        return records

    quiet, loud = start_gang(body, 2).results()
    assert quiet == []
    assert loud == ["rank 1 has gradients that are not finite: 0.bias, 0.weight"]


@pytest.mark.sample(2, 2)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.usefixtures("compiler")
def test_compiled_modules(
    start_gang: Callable[..., Any], store_path: str, defers: bool, outside: bool
) -> None:
    """Compiled code reads parameters behind Python's back: all have arrived when it runs; guards hold."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        torch._dynamo.reset()  # what tests of this process compiled before the fork
        torch._dynamo.config.error_on_recompile = True
        core = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(core.parameters(), lr=0.1)
        inner: Any = core if outside else torch.compile(core, backend="eager")
        model: Any = DistributedDataParallel(inner, optimizer=optimizer if defers else None)
        if outside:
            model = torch.compile(model, backend="eager")
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(rank + step))).square().mean().backward()
            optimizer.step()
        return [p.detach().numpy() for p in core.parameters()]

    def plain() -> list[torch.Tensor]:
        core = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        return list(core.parameters())

    first, second = start_gang(body, 2).results()
    for a, b, p in zip(first, second, plain(), strict=True):
        assert (a == b).all()
        assert a.shape == p.shape
