"""Pipelines with tensor, expert and data parallelism at once: the parameters of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.haiscale.tensor.models import HEAD, LENGTH, WIDTH, WORDS, Block, init, whole, worst
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.expert import MoE, average_gradients
from fireflyer.haiscale.pipeline import PipeDream, partition
from fireflyer.haiscale.tensor import (
    Column,
    Row,
    Vocabulary,
    clip_grad_norm_,
    cross_entropy,
    parallelize,
)

ROWS, CHUNKS, STEPS, CLIP = 8, 2, 3, 0.5
PLAN: dict[str, Any] = {
    "words": Vocabulary(),
    "*.[qkv]": Column(),
    "*.up": Column(),
    "*.out": Row(),
    "*.down": Row(),
    "head": Column(),
}
State = dict[str, Any]


class Sparse(nn.Module):
    """Attention, then experts."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, 12, experts=4, top_k=2, shared=1, mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.moe(self.norm2(x))
        return y


def model(mesh: Any = None, sparse: bool = False) -> nn.Sequential:
    torch.manual_seed(4)
    parts = nn.Sequential()
    parts.add_module("words", nn.Embedding(WORDS, WIDTH))
    for number in range(4):
        parts.add_module(f"block{number}", Sparse(mesh) if sparse else Block())
    parts.add_module("norm", nn.LayerNorm(WIDTH))
    parts.add_module("head", nn.Linear(WIDTH, WORDS, bias=False))
    if not sparse:
        parts.get_submodule("head").weight = parts.get_submodule("words").weight
    return parts.double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return words[:, :-1], words[:, 1:]


def plain(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained(
    path: str, pp: int, data: int, tp: int, sparse: bool
) -> Callable[[int, int], tuple[State, list[float]]]:
    def body(rank: int, world: int) -> tuple[State, list[float]]:
        init(path, rank, world)
        names = ("pp", "ep" if sparse else "dp_replicate", "tp")
        mesh = init_device_mesh("cpu", (pp, data, tp), mesh_dim_names=names)
        replicas, tensor = mesh.get_group(names[1]), mesh.get_group("tp")
        net: Any = model(mesh["ep"] if sparse else None, sparse)
        plan = {
            key: style for key, style in PLAN.items() if not sparse or key[2:] not in ("up", "down")
        }
        net = parallelize(net, plan, mesh["tp"])
        stage = partition(net, mesh.get_local_rank("pp"), pp, balance=[4, 3] if pp > 1 else [7])
        kept = stage if sparse else DistributedDataParallel(stage, replicas)
        pipe = PipeDream(kept, CHUNKS, mesh.get_group("pp"), outputs="none")
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        share, norms = ROWS // data, []
        mine = slice(
            mesh.get_local_rank(names[1]) * share, (mesh.get_local_rank(names[1]) + 1) * share
        )
        for step in range(STEPS):
            x, labels = (part[mine] for part in batch(step))
            optimizer.zero_grad()
            pipe.forward_backward(
                x, criterion=lambda y, at: cross_entropy(y, at, tensor), labels=labels
            )
            if sparse:
                average_gradients(pipe)
            norms.append(float(pipe.clip_grad_norm_(CLIP)))
            optimizer.step()
        return whole(pipe.state_dict()), norms

    return body


def alone(path: str, sparse: bool) -> Callable[[int, int], tuple[State, list[float]]]:
    def body(rank: int, world: int) -> tuple[State, list[float]]:
        init(path, rank, world)
        net = model(None, sparse)
        optimizer, norms = torch.optim.AdamW(net.parameters(), lr=1e-2), []
        for step in range(STEPS):
            x, labels = batch(step)
            optimizer.zero_grad()
            plain(net(x), labels).backward()
            norms.append(float(clip_grad_norm_(net, CLIP)))
            optimizer.step()
        return whole(net.state_dict()), norms

    return body


@pytest.mark.parametrize(
    ("pp", "data", "tp", "sparse"),
    [
        (2, 1, 2, False),
        (2, 2, 1, True),
        pytest.param(1, 2, 2, True, marks=pytest.mark.full),
        pytest.param(2, 2, 2, False, marks=pytest.mark.full),
        pytest.param(2, 2, 2, True, marks=pytest.mark.full),
    ],
)
def test_layouts_equal_one_process(
    start_gang: Callable[..., Any], store_path: str, pp: int, data: int, tp: int, sparse: bool
) -> None:
    expected, norms = start_gang(alone(f"{store_path}-alone", sparse), 1).results()[0]
    found: State = {}
    for state, seen in start_gang(
        trained(store_path, pp, data, tp, sparse), pp * data * tp
    ).results():
        found.update(state)
        assert seen == pytest.approx(norms, rel=1e-10)
    assert max(norms) > CLIP, "clipping acts"
    assert (
        worst(found, {name: torch.from_numpy(value) for name, value in expected.items()}) <= 1e-10
    )
