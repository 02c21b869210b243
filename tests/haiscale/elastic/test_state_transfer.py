"""States go from rank to rank as they are; and means over samples, whatever part of a batch a rank has."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.haiscale.elastic.elastic_job import X, Y, build, init
from torch import nn
from torch.nn import functional

from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.elastic import state_transfer
from fireflyer.haiscale.elastic.state_transfer import describe, rebuild, share

Start = Callable[..., Any]


def odd_state() -> dict[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "plain": [None, True, 3, -(2**63), 2**100, 1.5, float("inf"), "text", b"bytes"],
        0: {"step": torch.tensor(3.0), "empty": torch.empty(0, 4), 1.5: "a key"},
        "betas": (0.9, (0.999,)),
        "milestones": Counter({3: 1, 6: 2}),
        "ordered": OrderedDict(b=1, a=2),
        "shape": torch.Size([2, 3]),
        "narrow": torch.randn(5, generator=generator).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "strided": torch.randn(6, 4, generator=generator, dtype=torch.float64)[::2, 1::2],
        "parameter": nn.Parameter(torch.randn(17, generator=generator)),
        "complex": torch.randn(3, generator=generator, dtype=torch.complex64),
        "array": np.arange(12, dtype=">i2").reshape(3, 4)[:, ::2],
        "single": np.array(2.5),
        "scalar": np.float32(0.1),
    }


def assert_equal(got: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert (type(got), got.dtype) == (torch.Tensor, wanted.dtype)
        assert torch.equal(got, wanted.detach())
        return
    assert type(got) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert (got.dtype, got.shape, got.tolist()) == (wanted.dtype, wanted.shape, wanted.tolist())
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key, value in wanted.items():
            assert_equal(got[key], value)
    elif isinstance(wanted, list | tuple):
        for one, other in zip(got, wanted, strict=True):
            assert_equal(one, other)
    else:
        assert got == wanted


@pytest.mark.parametrize("chunk", [7, 8 << 20])
def test_a_state_arrives_where_it_is_wanted(
    start_gang: Start, store_path: str, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(state_transfer, "CHUNK_BYTES", chunk)

    def body(rank: int, world: int) -> bool:
        group = init(store_path, rank, world)
        own = odd_state() if rank == 1 else None
        got = share(own, 1, group, takes=rank != 0)
        empty = share([], 0, group, takes=True)
        if rank == 2:
            assert_equal(got, odd_state())
            assert empty == []
        return got is None

    assert start_gang(body, 3).results() == [True, True, False]


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"a": [1, object()]}, r"state\['a'\]\[1\] is a builtins.object"),
        ({(object(),): 1}, "a key"),
        (torch.ones(2, 2).to_sparse(), "Tensor"),
        (torch.empty(2, device="meta"), "Tensor"),
        (np.array([None]), "ndarray"),
    ],
)
def test_what_cannot_be_sent_is_named(state: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        describe(state)


def test_a_description_holds_no_tensor() -> None:
    text, tensors = describe({"weight": torch.ones(1000)})
    assert (len(text) < 40, len(tensors)) == (True, 1)
    state, new = rebuild(text)
    assert state["weight"] is new[0]


PARTS = [[2, 2], [4, 0], [3, 1], [0, 3], [0, 0], [1, 4], [1, 1], [1, 1]]
"""Samples of two ranks, step by step."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_means_over_samples(
    start_gang: Start, store_path: str, dtype: torch.dtype
) -> None:
    def body(rank: int, world: int) -> list[list[Any]]:
        init(store_path, rank, world)
        core = build(0).to(dtype)
        optimizer = torch.optim.SGD(core.parameters(), lr=0.0)
        model = DistributedDataParallel(core, optimizer=optimizer, elastic=True, bucket_bytes=300)
        seen = []
        for parts in PARTS:
            first = sum(parts[:rank])
            mine = slice(first, first + parts[rank])
            with model.elastic.step(weight=parts[rank]):
                functional.cross_entropy(model(X[mine].to(dtype)), Y[mine]).backward()
                optimizer.step()
            seen.append([p.grad.numpy().copy() for p in core.parameters() if p.grad is not None])
        return seen

    ranks = start_gang(body, 2).results()
    for step, parts in enumerate(PARTS):
        core = build(0).to(dtype)
        mine = slice(sum(parts))
        functional.cross_entropy(core(X[mine].to(dtype)), Y[mine]).backward()
        for index, parameter in enumerate(core.parameters()):
            assert parameter.grad is not None
            wanted = parameter.grad if sum(parts) else torch.zeros_like(parameter)
            first, second = (torch.from_numpy(seen[step][index]) for seen in ranks)
            assert torch.equal(first, second)
            limit = 1e-12 if dtype is torch.float64 else 1e-6
            assert float((first - wanted).norm()) <= limit * (1 + float(wanted.norm()))


def test_a_weight_may_be_set_within_the_step(start_gang: Start, store_path: str) -> None:
    def body(rank: int, world: int) -> float:
        init(store_path, rank, world)
        core = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(core.parameters(), lr=0.1)
        model = DistributedDataParallel(core, optimizer=optimizer, elastic=True)
        with model.elastic.step() as step:
            step.weight = 1 + 2 * rank
            model(torch.full((1, 1), float(rank))).sum().backward()
        assert core.weight.grad is not None
        assert dist.get_world_size() == 2
        return float(core.weight.grad)

    assert start_gang(body, 2).results() == [0.75, 0.75]
