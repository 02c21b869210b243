"""Sharded training is invisible: the same parameters as one process with the whole batch, in every mode."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.draws import full
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fireflyer.haiscale.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    hybrid_mesh,
)

STEPS = 20 if full() else 6
BATCH = 8
LENGTH = 6
WORDS = 31
WIDTH = 10


class Block(nn.Module):
    """Sizes that no number of ranks divides; a frozen part; a parameter that is used now and then."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.up = nn.Linear(WIDTH, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.down = nn.Linear(13, WIDTH)
        self.extra = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor, often: bool = True) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.frozen(self.up(x))))
        return x + y * (1 + self.extra.sum()) if often else x + y


class Model(nn.Module):
    """A tied head, parameters that no forward reaches, activation checkpointing, a buffer."""

    scale: torch.Tensor

    def __init__(self, seed: int = 0, recompute: bool = False, micro: int = 1) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(place) for place in range(3)])
        self.never = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((), 2.0 + seed))
        self.recompute = recompute
        self.calls, self.micro = 0, micro

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) * self.scale
        often = self.calls // self.micro % 3 != 2
        self.calls += 1
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self.recompute else block
            x = run(x, often)
        return functional.linear(x, self.words.weight)


BLOCKS = ModuleWrapPolicy({Block})


def init(path: str, rank: int, world: int) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


def data(step: int) -> torch.Tensor:
    return torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return functional.cross_entropy(
        logits.flatten(0, 1).float().to(torch.float64), batch[:, 1:].flatten()
    )


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True),
}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    share: slice = slice(None),
    clip: float = 0.0,
    micro: int = 1,
    to_none: bool = True,
) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=to_none)
        parts = data(step)[share].chunk(micro)
        for number, part in enumerate(parts):
            loss = loss_of(model, part) / micro
            if isinstance(model, FullyShardedDataParallel) and number < micro - 1:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        if clip and isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(clip)
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()


def differences(found: dict[str, Any], reference: nn.Module) -> dict[str, float]:
    """By name: the norm of the difference over the norm."""
    return {
        name: float(torch.linalg.norm(torch.from_numpy(found[name]).double() - tensor.double()))
        / max(1e-30, float(torch.linalg.norm(tensor.double())))
        for name, tensor in reference.state_dict().items()
    }


def outcome(
    rank: int, world: int, dtype: torch.dtype, kind: str, defers: bool, **options: Any
) -> dict[str, Any]:
    """Trains a share of the batches; the whole state dict at the end."""
    keys = ("clip", "micro", "to_none")
    how = {key: options.pop(key) for key in keys if key in options}
    core = Model(rank, options.pop("recompute", False), how.get("micro", 1)).to(dtype)
    make = OPTIMIZERS[kind]
    policy = options.pop("auto_wrap_policy", BLOCKS)
    model = FullyShardedDataParallel(
        core, optimizer=make if defers else None, auto_wrap_policy=policy, **options
    )
    optimizer = model.optimizer or make([*model.parameters()])
    size = BATCH // world
    train(model, optimizer, slice(rank * size, (rank + 1) * size), **how)
    for parameter in core.never.parameters():
        assert parameter.grad is None
    return {name: t.numpy() for name, t in model.state_dict(full=True).items()}


MODES: dict[str, dict[str, Any]] = {
    "zero-3": {},
    "zero-2": {"reshard_after_forward": False},
    "one unit": {"auto_wrap_policy": None},
    "by size": {"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=400)},
    "prefetch after": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": 2},
    "no prefetch": {"backward_prefetch": None, "forward_prefetch": 0, "backlog": 1},
    "clip": {"clip": 0.05},
    "accumulate": {"micro": 2},
    "recompute": {"recompute": True},
    "offload": {"cpu_offload": True},
}


@pytest.mark.sample(1, 8)
@pytest.mark.parametrize("mode", MODES)
def test_equals_one_process_with_the_global_batch(
    start_gang: Callable[..., Any], store_path: str, mode: str
) -> None:
    options = dict(MODES[mode])
    reference = Model(micro=options.get("micro", 1)).double()
    clip, micro = options.get("clip", 0.0), options.get("micro", 1)
    train(reference, OPTIMIZERS["adamw"]([*reference.parameters()]), clip=clip, micro=micro)

    def body(rank: int, world: int) -> list[dict[str, Any]]:
        init(store_path, rank, world)
        return [
            outcome(rank, world, torch.float64, "adamw", defers, **options)
            for defers in (False, True)
        ]

    for both in start_gang(body, 2, 2 if mode == "zero-3" else 1).results():
        for way, found in zip(("synchronous", "deferred"), both, strict=True):
            wrong = {name: d for name, d in differences(found, reference).items() if not d <= 1e-10}
            assert wrong == {}, way


@pytest.mark.full  # the quick test of two hosts also replicates
@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(("reshard", "defers"), [(True, True), (False, False), (2, True)])
def test_four_ranks_on_two_hosts(
    start_gang: Callable[..., Any], store_path: str, reshard: bool | int, defers: bool
) -> None:
    reference = Model()
    train(reference, OPTIMIZERS["sgd"]([*reference.parameters()]))

    def body(rank: int, world: int) -> dict[str, Any]:
        init(store_path, rank, world)
        how = {"reshard_after_forward": reshard}
        return outcome(rank, world, torch.float32, "sgd", defers, **how)

    ranks = start_gang(body, 4, 2).results()
    assert all((ranks[0][name] == found[name]).all() for found in ranks for name in found)
    assert max(differences(ranks[0], reference).values()) <= 2e-6


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(
    ("given", "defers"), [("helper", True), ("mesh", False), ("one a host", True)]
)
def test_shards_inside_the_host_and_replicas_between(
    start_gang: Callable[..., Any], store_path: str, given: str, defers: bool
) -> None:
    reference = Model().double()
    train(reference, OPTIMIZERS["adamw"]([*reference.parameters()]), clip=0.1)

    def body(rank: int, world: int) -> dict[str, Any]:
        init(store_path, rank, world)
        names = ("dp_replicate", "dp_shard")
        rows = [[0, 1], [2, 3]] if given == "mesh" else [[0], [1], [2], [3]]
        mesh = hybrid_mesh() if given == "helper" else DeviceMesh("cpu", rows, mesh_dim_names=names)
        assert mesh.shape == ((2, 2) if given != "one a host" else (4, 1))
        return outcome(rank, world, torch.float64, "adamw", defers, mesh=mesh, clip=0.1)

    for found in start_gang(body, 4, 4 if given == "one a host" else 2).results():
        assert max(differences(found, reference).values()) <= 1e-10


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "defers"),
    [
        ({"wire": "bf16"}, False),
        ({"wire": "int8"}, True),
        ({"gather_dtype": torch.bfloat16, "wire": "bf16"}, True),
        ({"mixed_precision": MixedPrecisionPolicy(torch.bfloat16)}, False),
        ({"mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, True),
    ],
    ids=["bf16", "int8", "bf16 both ways", "bf16 compute", "bf16 compute, fp32 sums"],
)
def test_low_precision(
    start_gang: Callable[..., Any], store_path: str, options: dict[str, Any], defers: bool
) -> None:
    reference = Model()
    train(reference, OPTIMIZERS["sgd"]([*reference.parameters()]))

    def body(rank: int, world: int) -> dict[str, Any]:
        init(store_path, rank, world)
        return outcome(rank, world, torch.float32, "sgd", defers, **options)

    first, second = start_gang(body, 2, 2).results()
    assert all((first[name] == second[name]).all() for name in first)
    far = differences(first, reference)
    assert max(far.values()) > 1e-5, "nothing was rounded"
    assert max(d for name, d in far.items() if not name.endswith("extra")) < 0.02


def test_a_world_of_one(start_gang: Callable[..., Any], store_path: str) -> None:
    reference = Model().double()
    train(reference, OPTIMIZERS["adamw"]([*reference.parameters()]))

    def body(rank: int, world: int) -> list[dict[str, Any]]:
        init(store_path, rank, world)
        return [outcome(rank, world, torch.float64, "adamw", defers) for defers in (False, True)]

    for found in start_gang(body, 1).results()[0]:
        assert max(differences(found, reference).values()) <= 1e-10
