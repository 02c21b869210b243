"""Buffers follow the first rank by the rule of torch's wrapper: the same values after the same script."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init
from torch import nn

from fireflyer.haiscale.ddp import DistributedDataParallel

StartGang = Callable[..., Any]


class Net(nn.Module):
    """BatchNorm, buffers that forward replaces, and buffers whose bytes lie at odd addresses."""

    mean: torch.Tensor
    scale: torch.Tensor
    count: torch.Tensor
    phase: torch.Tensor
    turned: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 2)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int8))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("turned", torch.zeros(2, 3, dtype=torch.float64).t())
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean = self.mean * 0.5 + x.mean(0)
                for buffer in (self.scale, self.count, self.phase, self.turned):
                    buffer.add_(1 if x.sum() > 40 else 2)
        result: torch.Tensor = self.last(self.norm(x) - self.mean) * self.scale.clone()
        return result


class Run:
    """One wrapped net in training; `seen` collects what forwards return."""

    def __init__(self, kind: str) -> None:
        self.net = Net()
        self.kind = kind
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.model: Any = nn.parallel.DistributedDataParallel(self.net)
        if kind != "torch":
            used = self.optimizer if kind == "deferred" else None
            self.model = DistributedDataParallel(self.net, optimizer=used)
        self.seen: list[torch.Tensor] = []

    def forward(self, number: int) -> torch.Tensor:
        x = torch.arange(12.0).view(4, 3) * (1 + number) + 5 * dist.get_rank()
        out: torch.Tensor = self.model(x)
        self.seen.append(out.detach().clone())
        return out

    def step(self, *losses: torch.Tensor) -> None:
        torch.stack(losses).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, number: int) -> None:
        self.step(self.forward(number).square().mean())

    def look(self) -> None:
        self.seen += [buffer.clone() for buffer in self.net.buffers()]


def evaluates(run: Run) -> None:
    run.train(0)
    run.model.eval()
    with torch.no_grad():
        run.forward(1)
    run.look()
    run.model.train()
    run.train(2)
    run.train(3)
    run.look()


def counts_without_gradients(run: Run) -> None:
    """As `update_bn`: forwards that change buffers, of which torch copies before the first only."""
    run.train(0)
    with torch.no_grad():
        for number in range(1, 4):
            run.forward(number)
    run.look()
    for number in range(4, 7):
        run.train(number)
        run.look()


def accumulates(run: Run) -> None:
    for first in (0, 3):
        with run.model.no_sync():
            for number in (first, first + 1):
                run.forward(number).square().mean().backward()
        run.train(first + 2)
        run.look()
    run.model.eval()
    run.forward(9)
    run.look()


def goes_forward_twice(run: Run) -> None:
    """As the discriminator of a GAN: one backward through both."""
    for number in range(2):
        real, generated = run.forward(number), run.forward(number + 1)
        run.step(real.square().mean(), generated.square().mean())
    run.look()


def writes_between_steps(run: Run) -> None:
    kept = {name: value.clone() for name, value in run.net.state_dict().items()}
    run.train(0)
    run.net.load_state_dict(kept)
    run.look()
    run.train(1)
    run.net.norm.reset_running_stats()
    run.net.mean = torch.full((3,), 7.0 + dist.get_rank())
    run.model.eval()
    run.forward(2)
    run.look()


SCRIPTS = (
    evaluates,
    counts_without_gradients,
    accumulates,
    goes_forward_twice,
    writes_between_steps,
)


@pytest.mark.parametrize("kind", ["synchronous", "deferred"])
def test_buffers_are_those_of_torchs_wrapper(
    start_gang: StartGang, store_path: str, kind: str
) -> None:
    def body(rank: int, world: int) -> bool:
        init(store_path, rank, world)
        for script in SCRIPTS:
            ours, theirs = Run(kind), Run("torch")
            for run in (ours, theirs):
                script(run)
            for number, (one, other) in enumerate(zip(ours.seen, theirs.seen, strict=True)):
                torch.testing.assert_close(one, other, msg=f"{script.__name__}, {number}: {one}")
        return True

    assert start_gang(body, 2).results() == [True, True]


def test_the_ranks_predict_alike(start_gang: StartGang, store_path: str) -> None:
    """After a step with other data on each rank."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        model = DistributedDataParallel(nn.BatchNorm1d(3))
        model(torch.arange(12.0).view(4, 3) * (1 + rank)).sum().backward()
        model.eval()
        with torch.no_grad():
            return model(torch.ones(1, 3)).tolist()

    first, second = start_gang(body, 2).results()
    assert first == second


@pytest.mark.parametrize("defers", [False, True])
def test_the_first_rank_may_evaluate_ahead(
    start_gang: StartGang, store_path: str, defers: bool
) -> None:
    """It waits for no other rank in a forward without gradients."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        store = dist.PrefixStore("turn", dist.distributed_c10d._get_default_store())
        core = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(core.parameters(), lr=0.1)
        model = DistributedDataParallel(core, optimizer=optimizer if defers else None)
        for number in range(2):
            model(torch.arange(12.0).view(4, 3) * (1 + rank)).sum().backward()
            optimizer.step()
            if rank > 0:
                store.wait([f"evaluated {number}"])
            model.settle()
            model.eval()
            with torch.no_grad():
                model(torch.ones(1, 3))
            if rank == 0:
                store.set(f"evaluated {number}", "")
            model.train()
        return [buffer.tolist() for buffer in core.buffers()]

    first, second = start_gang(body, 2).results()
    assert first == second
