"""A pipeline is invisible: the same parameters as one process with the whole batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.draws import full
from torch import nn
from torch.nn import functional

from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.pipeline import (
    GPipe,
    Interleaved1F1B,
    PipeDream,
    ZeroBubble,
    make_subgroups,
    partition,
)

STEPS = 20 if full() else 6
ROWS, WIDTH, WORDS, CHUNKS = 16, 6, 11, 4
KINDS: dict[str, Any] = {
    "gpipe": GPipe,
    "1f1b": PipeDream,
    "interleaved": Interleaved1F1B,
    "zb-h1": ZeroBubble,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Head(nn.Module):
    """A head that shares the words' weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    words = nn.Embedding(WORDS, WIDTH)
    parts = [words, *(Block() for _ in range(7)), Head(words.weight)]
    return nn.Sequential(*parts).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(WORDS, (ROWS, 5), generator=generator)
    return x, torch.roll(x, 1, 1)


def criterion(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def alone(clips: float = 0.0) -> tuple[dict[str, Any], list[float]]:
    net, losses = model(), []
    optimizer = adam(net.parameters())
    for step in range(STEPS):
        x, labels = batch(step)
        loss = criterion(net(x), labels)
        optimizer.zero_grad()
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), clips)
        optimizer.step()
        losses.append(loss.item())
    return {name: tensor.numpy() for name, tensor in net.state_dict().items()}, losses


def init(path: str, rank: int, world: int) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


def pipeline(kind: str, pp: int, **options: Any) -> tuple[Any, slice]:
    """The pipeline of this rank, with data parallelism over what is left; and its rows."""
    replicas, group = make_subgroups(pp_size=pp)
    chunks = 2 if kind == "interleaved" else 1
    stages = partition(model(), group.rank(), pp, num_model_chunks=chunks)
    data = dist.get_world_size() // pp
    if data > 1:
        wrap = [
            DistributedDataParallel(stage, replicas, bucket_bytes=512)
            for stage in (stages if chunks > 1 else [stages])
        ]
        stages = wrap if chunks > 1 else wrap[0]
    share = ROWS // data
    first = dist.get_rank(replicas) * share
    return KINDS[kind](stages, CHUNKS, group, **options), slice(first, first + share)


def trained(
    path: str, kind: str, pp: int, clips: float = 0.0, **options: Any
) -> Callable[[int, int], Any]:
    def body(rank: int, world: int) -> Any:
        init(path, rank, world)
        pipe, rows = pipeline(kind, pp, **options)
        optimizer, losses = adam(pipe.parameters()), []
        for step in range(STEPS):
            x, labels = (one[rows] for one in batch(step))
            optimizer.zero_grad()
            loss, outputs = pipe.forward_backward(x, criterion=criterion, labels=labels)
            assert abs(criterion(outputs, labels) - loss) < 1e-12, "the outputs of the whole batch"
            if clips:
                pipe.clip_grad_norm_(clips)
            optimizer.step()
            losses.append(loss.item())
        return {name: tensor.numpy() for name, tensor in pipe.state_dict().items()}, losses

    return body


def compare(results: list[Any], expected: tuple[dict[str, Any], list[float]]) -> None:
    state, losses = expected
    found: dict[str, Any] = {}
    for part, _ in results:
        found.update(part)
    assert set(found) == set(state)
    assert max(abs(found[name] - state[name]).max() for name in state) <= 1e-10
    means = torch.tensor([each for _, each in results], dtype=torch.float64).mean(0)
    assert (means - torch.tensor(losses, dtype=torch.float64)).abs().max() <= 1e-10


def check_twice(
    start_gang: Callable[..., Any], store_path: str, kind: str, pp: int, data: int
) -> None:
    """Trains a layout twice: equal to one process, and the same bits."""
    results, again = (
        start_gang(trained(f"{store_path}{turn}", kind, pp), pp * data).results()
        for turn in range(2)
    )
    compare(results, alone())
    for (one, _), (other, _) in zip(results, again, strict=True):
        assert all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_two_stages_equal_one_process_and_twice_the_same_bits(
    start_gang: Callable[..., Any], store_path: str, kind: str
) -> None:
    check_twice(start_gang, store_path, kind, 2, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pp", "data"), [(2, 2), (4, 1), (4, 2)])
def test_more_stages_and_replicas_equal_one_process_and_twice_the_same_bits(
    start_gang: Callable[..., Any], store_path: str, kind: str, pp: int, data: int
) -> None:
    check_twice(start_gang, store_path, kind, pp, data)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("1f1b", {"checkpoint": "except_last", "clips": 0.05}),
        ("interleaved", {"checkpoint": "always"}),
    ],
)
def test_recomputed_and_clipped_steps_equal_one_process(
    start_gang: Callable[..., Any], store_path: str, kind: str, options: dict[str, Any]
) -> None:
    clips = options.get("clips", 0.0)
    compare(start_gang(trained(store_path, kind, 2, **options), 2).results(), alone(clips))
