"""Data parallelism is invisible: the same parameters as one process with the whole batch."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.draws import full
from tests.support.test_allocator import mapped_by_a_large_block
from torch import nn
from torch.nn import functional

from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel

STEPS = 20 if full() else 6
BATCH = 24


class Net(nn.Module):
    """Shared weights, a frozen layer, a layer that no forward reaches, an integer buffer."""

    steps: torch.Tensor

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(20, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.tied = nn.Linear(64, 64)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(64, 5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.frozen(self.first(x)))
        result: torch.Tensor = self.last(torch.tanh(self.tied(torch.tanh(self.tied(x)))))
        return result


def init(path: str, rank: int, world: int) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


def data(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 20, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(5, (BATCH,), generator=generator)


def train(
    model: nn.Module,
    core: nn.Module,
    dtype: torch.dtype,
    share: slice,
    to_none: bool = True,
    micro: int = 1,
) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(core.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=to_none)
        x, y = data(step, dtype)
        x, y = x[share], y[share]
        for i, (xs, ys) in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
            loss = functional.cross_entropy(model(xs), ys) / micro
            if isinstance(model, DistributedDataParallel) and i < micro - 1:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in core.parameters()]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


LIMITS = {torch.float64: 1e-10, torch.float32: 2e-6}
WAYS = [*itertools.product(LIMITS, (True, False), (1, 2))]
"""Type, gradients set to None, backwards a step."""


@pytest.mark.sample(1, 3)
@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (3, 1), (2, 2), (4, 2)])
def test_equals_one_process_with_the_global_batch(
    start_gang: Callable[..., Any], store_path: str, world: int, nodes: int
) -> None:
    def body(rank: int, world: int) -> list[list[Any]]:
        init(store_path, rank, world)
        share, results = slice(rank * BATCH // world, (rank + 1) * BATCH // world), []
        for dtype, to_none, micro in WAYS:
            core = Net(seed=rank).to(dtype)  # rank 0's parameters win
            core.steps.fill_(1 << 40 if rank == 0 else 0)
            model = DistributedDataParallel(core, bucket_bytes=4096)
            assert core.steps.item() == 1 << 40
            result = train(model, core, dtype, share, to_none, micro)
            assert core.never.weight.grad is None
            results.append([r.numpy() for r in result])
        return results

    ranks = start_gang(body, world, nodes).results()
    for way, (dtype, to_none, _) in enumerate(WAYS):
        core = Net(seed=0).to(dtype)
        reference = train(core, core, dtype, slice(None), to_none)
        for index, expected in enumerate(reference):
            for result in ranks:
                found = result[way][index]
                assert (found == ranks[0][way][index]).all(), f"ranks differ in bits: {WAYS[way]}"
                assert relative(torch.from_numpy(found), expected) <= LIMITS[dtype], WAYS[way]


def test_a_parameter_used_on_one_rank_only(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core: Any = nn.ModuleList([nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)])

        class Pick(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers: Any = core

            def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
                result: torch.Tensor = self.layers[which](x)
                return result

        model = DistributedDataParallel(Pick())
        model(torch.ones(1, 4), which=rank).sum().backward()
        grads = [layer.weight.grad for layer in core]
        return [g is not None and g.tolist() for g in grads]

    assert start_gang(body, 2).results() == [[[[0.5] * 4], [[0.5] * 4]]] * 2


def test_reductions_start_before_backward_ends_and_in_one_order(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        model = DistributedDataParallel(layers, bucket_bytes=1)
        first = layers[0]
        started: list[int] = []
        first.register_full_backward_hook(
            lambda *_: started.append(sum(bool(b.works) for b in model.reducer.buckets))
        )
        model(torch.ones(2, 64, requires_grad=True)).sum().backward()
        return started, model.reducer.times.exposed_s > 0

    for started, waited in start_gang(body, 2).results():
        assert started[0] >= 10, "five of six layers (weight and bias each) must be under way"
        assert waited


@pytest.mark.sample(1)
@pytest.mark.parametrize("wire", [None, "bf16"])
def test_a_large_parameter_is_reduced_in_pieces(
    start_gang: Callable[..., Any], store_path: str, wire: str | None
) -> None:
    """What the next forward needs sooner can pass between two of them."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        layers = nn.Sequential(nn.Linear(2000, 2, bias=False), nn.Linear(2, 1 << 20, bias=False))
        model = DistributedDataParallel(layers, wire=wire)
        model(torch.full((1, 2000), float(rank))).sum().backward()
        large, small = (bucket.pieces for bucket in model.reducer.buckets)
        assert [piece.nbytes for piece in large] == [8 << 20]
        model = DistributedDataParallel(nn.Linear(3, (1 << 20) + 5, bias=False), wire=wire)
        model(torch.full((1, 3), float(rank))).sum().backward()
        cut = [piece.numel() for bucket in model.reducer.buckets for piece in bucket.pieces]
        grad = next(model.parameters()).grad
        assert grad is not None
        return len(small), cut, model.reducer.times.reductions, grad.unique().tolist()

    whole = 2 << 20
    expected = (1, [whole, (1 << 20) + 15], 2, [0.5])
    assert start_gang(body, 2, nodes=2).results() == [expected] * 2


def test_bytes_on_the_wire_are_those_of_a_ring(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        model = DistributedDataParallel(nn.Linear(256, 256, bias=False))
        group: Any = dist.group.WORLD
        before = group.network_bytes_sent
        model(torch.ones(1, 256)).sum().backward()
        return group.network_bytes_sent - before

    payload = (256 * 256 + 1) * 4
    for sent in start_gang(body, 4, nodes=4).results():
        bound = payload * 2 * 3 / 4
        assert bound * 0.99 <= sent <= bound * 1.01 + 100


def test_wrong_uses_are_named(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        store = dist.FileStore(store_path, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        with pytest.raises(ConfigError, match="hfreduce"):
            DistributedDataParallel(nn.Linear(2, 2))
        group = dist.new_group(backend="hfreduce")
        with pytest.raises(ConfigError, match="gradient"):
            DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False), group)
        model = DistributedDataParallel(nn.Linear(2, 2), group)

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                raise ValueError("in the middle of backward")

        fails: Any = Fails.apply
        x = fails(torch.ones(1, 2, requires_grad=True))
        with pytest.raises(ValueError, match="in the middle"):
            model(x).sum().backward()
        with pytest.raises(CollectiveError, match="half way"):
            model(torch.ones(1, 2))

    start_gang(body, 2).results()


def test_an_unmodified_torch_ddp_script(start_gang: Callable[..., Any], store_path: str) -> None:
    core = Net(seed=0)
    core.never.requires_grad_(False)
    reference = train(core, core, torch.float32, slice(None))

    def body(rank: int, world: int) -> list[Any]:
        init(store_path, rank, world)
        core = Net(seed=0)
        core.never.requires_grad_(False)
        model = nn.parallel.DistributedDataParallel(core, gradient_as_bucket_view=True)
        size = BATCH // world
        result = train(model, core, torch.float32, slice(rank * size, (rank + 1) * size))
        return [r.numpy() for r in result]

    for result in start_gang(body, 2).results():
        for got, expected in zip(result, reference, strict=True):
            assert relative(torch.from_numpy(got), expected) <= 2e-6


def test_ranks_keep_freed_memory(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> int:
        init(store_path, rank, world)
        DistributedDataParallel(nn.Linear(2, 2))
        return mapped_by_a_large_block()

    assert start_gang(body, 1).results() == [0]
