"""Plans that cannot work, losses of split logits, and a rank that dies."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.haiscale.tensor.models import Model, init
from torch import nn
from torch.nn import functional

from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.haiscale.tensor import Column, Row, Vocabulary, cross_entropy, parallelize


def refusal(plan: Any, model: nn.Module | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parallelize(model or Model(0), plan)
    return str(caught.value)


def test_plans_that_cannot_work(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> list[str]:
        init(store_path, rank, world)
        return [
            refusal({"blocks.*.upp": Column()}),
            refusal({"norm": Row()}),
            refusal({"0": Column()}, nn.Sequential(nn.Linear(4, 5))),
            refusal({"head": Column(), "he*": Column()}),
            refusal({"words": "vocabulary"}),
            refusal([Column()]),
            refusal({"head": Column(gather=rank == 1)}),
            refusal({"words": Vocabulary(), "nothing" if rank == 1 else "norm.*": Column()}),
            refusal({"0": Column()}, nn.Sequential(nn.Linear(4, 4 + 2 * rank))),
        ]

    first, *others = start_gang(body, 2).results()
    assert all(other == first for other in others), "every rank gets the same error"
    expected = [
        "the plan's pattern 'blocks.*.upp' names no module",
        "Row does not fit norm: expected nn.Linear, not LayerNorm",
        "2 ranks do not divide the 5 out_features of 0",
        "two patterns of the plan name module 'head'",
        "invalid style 'vocabulary' (str) for 'words'",
        "invalid plan [Column(gather=False, sequence=False)] (list): expected a dict",
        "rank 0 has plan['head']=Column(gather=False, sequence=False), rank 1 has",
        "rank 0: the plan's pattern 'norm.*' names no module",
        "rank 0 has parameter 0.weight (4, 4)",
    ]
    for said, part in zip(first, expected, strict=True):
        assert part in said


def test_losses_of_split_logits(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        group = dist.group.WORLD
        assert group is not None
        torch.manual_seed(0)
        logits = (100 * torch.randn(3, 5, 12, dtype=torch.float64)).requires_grad_()
        targets = torch.randint(12, (3, 5))
        targets[0, 0] = targets[2, 1] = -100
        own = slice(rank * 12 // world, (rank + 1) * 12 // world)
        for reduction in ("mean", "sum", "none"):
            wanted = functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction=reduction
            )
            mine = logits[..., own].detach().requires_grad_()
            found = cross_entropy(mine, targets, group, reduction=reduction)
            assert torch.allclose(found.flatten(), wanted.flatten(), rtol=1e-12)
            (gradient,) = torch.autograd.grad(wanted.sum(), logits)
            found.sum().backward()
            assert mine.grad is not None
            assert torch.allclose(mine.grad, gradient[..., own], rtol=1e-10, atol=1e-14)
        half = cross_entropy(logits[..., own].bfloat16(), targets, group)
        assert half.dtype == torch.float32
        with pytest.raises(ConfigError, match="expected 0 to 11"):
            cross_entropy(logits[..., own], targets + 20, group)
        with pytest.raises(ConfigError, match="do not fit targets"):
            cross_entropy(logits[..., own], targets[0], group)
        with pytest.raises(ConfigError, match="invalid reduction"):
            cross_entropy(logits[..., own], targets, group, reduction="max")

    start_gang(body, 2).results()


def test_layers_that_take_and_give_whole_values(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6)).double()
        x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
        wanted = layers(x)
        (gradient,) = torch.autograd.grad(wanted.square().sum(), x)
        parallelize(layers, {"0": Column(gather=True), "2": Row(scatter=True)})
        found = layers(x)
        found.square().sum().backward()
        assert torch.allclose(found, wanted, rtol=1e-12)
        assert x.grad is not None
        assert torch.allclose(x.grad, gradient, rtol=1e-12)
        assert "not ColumnParallelLinear" in refusal({"0": Column()}, layers)
        odd = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6)).double()
        parallelize(odd, {"0": Column(), "1": Row(sequence=True)})
        with pytest.raises(ConfigError, match="2 does not divide 3"):
            odd(x)

    start_gang(body, 2).results()


def test_a_rank_that_dies(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> str:
        init(store_path, rank, world)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        parallelize(model, {"0": Column(), "1": Row()})
        model(torch.ones(2, 6)).sum().backward()
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CollectiveError) as caught:
            model(torch.ones(2, 6))
        return type(caught.value).__name__

    gang = start_gang(body, 2)
    assert gang.result(0) == "RankFailed"
