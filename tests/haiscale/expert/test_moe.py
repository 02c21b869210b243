"""Training with experts split over ranks gives the parameters of one rank that holds them all."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.haiscale.expert.models import EXPERTS, STEPS, TOKENS, Model, data, init, loss_of
from tests.haiscale.tensor.models import whole, worst
from torch.distributed.device_mesh import init_device_mesh

from fireflyer.haiscale.expert import MoE, average_gradients, rebalance_experts
from fireflyer.haiscale.tensor import load_optimizer_state, optimizer_state

Outcome = tuple[dict[str, Any], list[dict[str, Any]]]


def shares(ranks: int) -> list[slice]:
    """Cuts tokens into unequal shares; the last rank has none."""
    parts = max(1, ranks - 1)
    edges = [TOKENS * n // parts for n in range(parts)] + [TOKENS] * (ranks - parts + 1)
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def train(
    rank: int, ranks: int, data_group: Any = None, moves: bool = False, **options: Any
) -> Outcome:
    model = Model(rank, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    share = shares(ranks)[rank]
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        loss_of(model, x[share], y[share], ranks).backward()
        average_gradients(model, data_group)
        optimizer.step()
        for layer in (model.first, model.second):
            loads = layer.take_loads()
            assert int(loads.sum()) == TOKENS * layer.router.top_k // data_copies(data_group)
            layer.router.update_bias(loads, 0.05)
            if moves:
                slots = layer.experts.phy2log.numel()
                size = layer.experts.group.size()
                weight = torch.rand(1, EXPERTS, generator=torch.Generator().manual_seed(step))
                layer.place(rebalance_experts(weight, slots, 1, 1, size).phy2log[0], optimizer)
    moments = optimizer_state(model, optimizer)
    again = Model(rank, **options)
    again.load_state_dict(model.state_dict())
    load_optimizer_state(again, torch.optim.AdamW(again.parameters()), moments)
    state = again.state_dict() if moves else model.state_dict()
    return whole(state), [whole(moments["state"][n]) for n in sorted(moments["state"])]


def data_copies(group: Any) -> int:
    return 1 if group is None else int(group.size())


@pytest.fixture
def reference(start_gang: Callable[..., Any], store_path: str) -> Outcome:
    def body(rank: int, world: int) -> Outcome:
        init(f"{store_path}-alone", rank, world)
        return train(0, 1)

    outcome: Outcome = start_gang(body, 1).results()[0]
    return outcome


def check(found: list[Outcome], reference: Outcome) -> None:
    expected = {name: torch.from_numpy(value) for name, value in reference[0].items()}
    for state, moments in found:
        assert worst(state, expected) <= 1e-10
        for moment, wanted in zip(moments, reference[1], strict=True):
            assert worst(moment, {k: torch.from_numpy(v) for k, v in wanted.items()}) <= 1e-10


@pytest.mark.parametrize(
    ("ranks", "hosts", "moves", "replicas"),
    [
        (2, 1, False, EXPERTS),
        (4, 2, True, EXPERTS + 4),
        pytest.param(2, 2, True, EXPERTS, marks=pytest.mark.full),
        pytest.param(4, 2, False, EXPERTS, marks=pytest.mark.full),
        pytest.param(4, 1, False, EXPERTS + 8, marks=pytest.mark.full),
        pytest.param(4, 4, True, EXPERTS + 4, marks=pytest.mark.full),
    ],
)
def test_expert_parallel(
    start_gang: Callable[..., Any],
    store_path: str,
    reference: Outcome,
    ranks: int,
    hosts: int,
    moves: bool,
    replicas: int,
) -> None:
    def body(rank: int, world: int) -> Outcome:
        init(store_path, rank, world)
        return train(rank, world, moves=moves, replicas=replicas)

    check(start_gang(body, ranks, hosts).results(), reference)


@pytest.mark.full
def test_expert_by_data_parallel(
    start_gang: Callable[..., Any], store_path: str, reference: Outcome
) -> None:
    """Two copies of the experts, each of which sees all tokens: the mean is that of one."""

    def body(rank: int, world: int) -> Outcome:
        init(store_path, rank, world)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "ep"))
        copies = mesh.get_group("dp_replicate")
        return train_copies(mesh, copies)

    def train_copies(mesh: Any, copies: Any) -> Outcome:
        model = Model(0, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        row, column = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("ep")
        half = slice(12 * column, 12 * column + 12)
        for step in range(STEPS):
            x, y = data(step)
            optimizer.zero_grad()
            # The two copies weigh their losses 0.5 and 1.5, so that only their mean is right.
            (loss_of(model, x[half], y[half], 2) * (0.5 + row)).backward()
            average_gradients(model, copies)
            optimizer.step()
            for layer in (model.first, model.second):
                layer.router.update_bias(layer.take_loads(), 0.05)
        moments = optimizer_state(model, optimizer)["state"]
        return whole(model.state_dict()), [whole(moments[n]) for n in sorted(moments)]

    check(start_gang(body, 4).results(), reference)


def test_the_auxiliary_loss_and_the_bias(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        torch.manual_seed(0)
        layer = MoE(4, 4, experts=4, top_k=1)
        with torch.no_grad():
            layer.router.weight[2] += 2.0
        x = torch.rand(64, 4) + 1
        layer(x)
        assert layer.aux_loss.detach() > 3, "all tokens go to one expert of four"
        layer.aux_loss.backward()
        assert layer.router.weight.grad is not None
        assert float(layer.router.weight.grad[2].sum()) > 0, "a step makes its score smaller"
        for _ in range(200):
            layer(x)
            layer.router.update_bias(layer.take_loads(), 0.01)
        for _ in range(20):
            layer(x)
            layer.router.update_bias(layer.loads, 0.001)
        assert int(layer.loads.max()) < 0.5 * int(layer.loads.sum())

    start_gang(body, 1).results()
