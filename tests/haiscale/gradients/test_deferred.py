"""With `optimizer=` communication goes on after `step()`, and yet nobody sees a value that is to change."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.draws import full
from torch import nn
from torch.nn import functional

from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.gradients.deferred import DeferredParameter

STEPS = 20 if full() else 6
BATCH = 8
LENGTH = 6
WORDS = 30
WIDTH = 16


class Model(nn.Module):
    """What hooks on modules miss: a tied head, attention's projection, a parameter without a module."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.never = nn.Linear(3, 3)
        self.deep = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.deep(x) * self.gain
        return functional.linear(x, self.words.weight)


def init(path: str, rank: int, world: int) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


def data(step: int) -> torch.Tensor:
    return torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    ),
}


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, share: slice, clip: float = 0.0
) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step)[share]).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()


def pending(model: nn.Module) -> list[bool]:
    return [type(p) is DeferredParameter for p in model.parameters()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (4, 2)])
def test_equals_one_process(
    start_gang: Callable[..., Any], store_path: str, world: int, nodes: int, kind: str, clip: float
) -> None:
    reference = Model().double()
    train(reference, OPTIMIZERS[kind](reference), slice(None), clip)

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = Model(rank).double()
        optimizer = OPTIMIZERS[kind](core)
        model = DistributedDataParallel(core, optimizer=optimizer, bucket_bytes=1024)
        size = BATCH // world
        train(model, optimizer, slice(rank * size, (rank + 1) * size), clip)
        left = sum(pending(core))
        state = {name: tensor.numpy() for name, tensor in core.state_dict().items()}
        assert not any(pending(core))
        moments = optimizer.state_dict()["state"]
        return left, state, len(moments)

    expected = reference.state_dict()
    for left, state, moments in start_gang(body, world, nodes).results():
        assert (left == 0) == bool(clip), "clipping looks at every gradient; nothing else does"
        assert moments == len(list(reference.parameters())) - 2  # `never` has none
        for name, tensor in expected.items():
            error = torch.linalg.norm(torch.from_numpy(state[name]) - tensor)
            assert float(error) <= 1e-10 * max(1.0, float(torch.linalg.norm(tensor))), name


def test_a_parameter_waits_until_its_layer_runs(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    """Rank 1 takes part in the second step only when rank 0 has seen that its parameters wait."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        optimizer = torch.optim.SGD(core.parameters(), lr=0.1)
        model = DistributedDataParallel(core, optimizer=optimizer, bucket_bytes=1)
        seen = []
        for layer in core:
            layer.register_forward_hook(lambda *_: seen.append(pending(core)))
        for _ in range(3):
            seen.clear()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert pending(core) == [True] * 3
        assert [p.grad for p in core.parameters()] == [None] * 3
        assert pending(core) == [True] * 3, "there is no gradient any more: nothing to wait for"
        return seen

    expected = [[False, True, True], [False, False, True], [False, False, False]]
    assert start_gang(body, 2).results() == [expected, expected]


LOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "print": lambda m: repr(next(m.parameters())),
    "data": lambda m: next(m.parameters()).data.sum(),
    "numpy": lambda m: next(m.parameters()).detach().numpy().sum(),
    "address": lambda m: next(m.parameters()).data_ptr(),
    "state_dict": lambda m: m.state_dict(),
    "save": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "copy": copy.deepcopy,
    "norm": lambda m: torch.nn.utils.get_total_norm(list(m.parameters())),
    "vector": lambda m: torch.nn.utils.parameters_to_vector(m.parameters()),
    "functional": lambda m: torch.func.functional_call(
        m, dict(m.named_parameters()), (torch.ones(1, 4),)
    ),
    "foreach": lambda m: torch._foreach_norm(list(m.parameters())),
}


def test_whoever_looks_sees_the_new_value(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(core.parameters(), lr=0.1)
        model = DistributedDataParallel(core, optimizer=optimizer)
        bias = 0.0
        with torch.no_grad():
            core.bias.zero_()
        for name, look in LOOKS.items():
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            bias -= 0.1
            assert all(pending(core)), name
            look(core)
            assert not any(pending(core)), name
            assert core.bias[0].item() == pytest.approx(bias), name
        return True

    assert start_gang(body, 2).results() == [True, True]


def test_what_reads_nothing_waits_for_nothing(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(core.parameters(), lr=0.1)
        model = DistributedDataParallel(core, optimizer=optimizer)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        weight = core.weight
        assert weight.shape == (4, 4)
        assert (weight.dtype, weight.device, weight.requires_grad) == (
            torch.float32, torch.device("cpu"), True,
        )  # fmt: skip
        assert sum(p.numel() for p in core.parameters()) == 20
        assert isinstance(weight, nn.Parameter)
        model.train().zero_grad()
        optimizer.zero_grad(set_to_none=False)
        return pending(core)

    assert start_gang(body, 2).results() == [[True, True]] * 2


def test_accumulation_and_a_step_that_is_left_out(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            core.weight.zero_()
        optimizer = torch.optim.SGD(core.parameters(), lr=1.0)
        model = DistributedDataParallel(core, optimizer=optimizer)
        one = torch.full((1, 2), float(rank))
        with model.no_sync():
            model(one).sum().backward()
        model(one).sum().backward()  # 2 x 0.5 on average
        model(one).sum().backward()  # no step, no zero_grad: it adds up
        assert core.weight.grad is not None
        before = core.weight.grad.tolist()
        optimizer.step()
        return before, core.weight.tolist()

    assert start_gang(body, 2).results() == [([[1.5, 1.5]], [[-1.5, -1.5]])] * 2


def test_a_grad_scaler_leaves_a_step_out(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            core.weight.zero_()
        optimizer = torch.optim.SGD(core.parameters(), lr=1.0)
        model = DistributedDataParallel(core, optimizer=optimizer, check_gradients=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        weights = []
        for value in (1.0, float("inf") if rank else 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            weights.append(core.weight.tolist()[0][0])
        return weights

    assert start_gang(body, 2).results() == [[-1.0, -1.0, -2.0]] * 2


def test_an_optimizer_that_needs_all_at_once(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.Linear(2, 1)
        optimizer = torch.optim.LBFGS(core.parameters())
        with pytest.raises(ConfigError, match="LBFGS"):
            DistributedDataParallel(core, optimizer=optimizer)
        return True

    assert start_gang(body, 1).results() == [True]


def test_the_end(start_gang: Callable[..., Any], store_path: str) -> None:
    """`reducer.stop()` gives model and optimizer back as they were."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(core.parameters(), lr=1.0)
        model = DistributedDataParallel(core, optimizer=optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model.reducer.stop()
        assert not any(pending(core))
        with torch.no_grad():
            core.weight.zero_()
        optimizer.zero_grad()
        core(torch.full((1, 2), float(rank))).sum().backward()
        optimizer.step()
        return core.weight.tolist()

    assert start_gang(body, 2).results() == [[[0.0, 0.0]], [[-1.0, -1.0]]]
