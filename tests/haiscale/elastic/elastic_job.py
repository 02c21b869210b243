"""A small training job for the tests of elastic training, and how its ranks come to die."""

import contextlib
import datetime
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.waiting import until
from torch import nn
from torch.nn import functional

from fireflyer.datasets import DistributedLoader
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.elastic.training import Elastic

STEPS = 9
SAMPLES = 44
BATCH = 10
"""Not divisible by four or three, and the last of an epoch is shorter still."""
POINTS = ("forward", "backward", "before the update", "in the update", "between steps")

_made = torch.Generator().manual_seed(7)
X = torch.randn(SAMPLES, 6, generator=_made, dtype=torch.float64)
Y = torch.randint(4, (SAMPLES,), generator=_made)

Act = Callable[[str], None]


class Numbers:
    """A reader whose sample i is i."""

    n = SAMPLES

    def read(self, indices: Any) -> list[int]:
        return [int(index) for index in indices]


class Counting(nn.Module):
    """Counts forwards in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def build(seed: int, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(6, width), Counting(), nn.Tanh(), nn.Linear(width, 4))
    return layers.double()


class Job:
    """What a rank trains with. `wrap` makes it elastic."""

    def __init__(self, seed: int, rank: int, world: int, width: int = 8) -> None:
        self.core: Any = build(seed, width)
        self.optimizer = torch.optim.AdamW(self.core.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 6], gamma=0.5)
        self.loader = DistributedLoader(Numbers(), rank, world, seed=1, batch_size=BATCH)
        self.model: Any = self.core
        self.act: Act = lambda point: None

    def wrap(self, **options: Any) -> Elastic:
        options = {"bucket_bytes": 300, "redivide": self.loader.redivide, **options}
        self.model = DistributedDataParallel(
            self.core, optimizer=self.optimizer, elastic=True, **options
        )
        elastic: Elastic = self.model.elastic
        elastic.carry(self.loader, self.scheduler)
        self.core[0].register_forward_hook(lambda *_: self.act("forward"))
        self.core[2].register_full_backward_hook(lambda *_: self.act("backward"))
        self.optimizer.register_step_pre_hook(lambda *_: self.act("in the update"))
        return elastic

    def batches(self) -> Iterator[list[int]]:
        while True:
            yield from self.loader

    def update(self, mine: list[int]) -> None:
        loss = functional.cross_entropy(self.model(X[mine]), Y[mine])
        loss.backward()
        self.act("before the update")
        self.optimizer.step()
        self.scheduler.step()

    def train(self, steps: int = STEPS) -> None:
        """Elastically."""
        batches = self.batches()
        elastic = self.model.elastic
        while elastic.steps < steps:
            with elastic.step() as step:
                mine = next(batches)
                step.weight = len(mine)
                self.update(mine)
            self.act("between steps")

    def result(self) -> dict[str, Any]:
        """Plain and comparable, but for the parameters."""
        moments = self.optimizer.state_dict()["state"]
        return {
            "steps": self.model.elastic.steps,
            "world": dist.get_world_size(),
            "rank": dist.get_rank(),
            "loader": self.loader.state_dict(),
            "division": (self.loader.rank, self.loader.world),
            "scheduler": dict(self.scheduler.state_dict()),
            "forwards": int(self.core.get_buffer("1.calls")),
            "bytes": [t.detach().numpy().tobytes() for t in self.core.state_dict().values()],
            "moments": [t.numpy().tobytes() for row in moments.values() for t in row.values()],
            "parameters": [p.detach().numpy() for p in self.core.parameters()],
        }


def alone(steps: int = STEPS) -> Job:
    """The same by one process, with the whole batches."""
    job = Job(0, 0, 1)
    batches = job.batches()
    for _ in range(steps):
        job.optimizer.zero_grad()
        job.update(next(batches))
    return job


def check(results: list[dict[str, Any]], world: int, steps: int = STEPS) -> None:
    """All of them are alike to the last bit, and what one process gets, up to rounding."""
    expected = alone(steps)
    assert (
        sorted(r["rank"] for r in results)
        == list(range(world))
        == sorted(r["division"][0] for r in results)
    )
    for result in results:
        assert (result["steps"], result["world"], result["division"][1]) == (steps, world, world)
        assert result["loader"] == expected.loader.state_dict()
        assert result["scheduler"] == dict(expected.scheduler.state_dict())
        for what in ("bytes", "moments"):
            assert result[what] == results[0][what], "ranks differ in bits"
        for got, wanted in zip(result["parameters"], expected.core.parameters(), strict=True):
            error = (torch.from_numpy(got) - wanted.detach()).norm() / wanted.detach().norm()
            assert float(error) <= 1e-10
        assert result["forwards"] == steps, "those of steps that did not happen do not count"


def init(path: str, rank: int, world: int, timeout_s: float = 60.0) -> Any:
    dist.init_process_group(
        "hfreduce",
        store=dist.FileStore(path, world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return dist.group.WORLD


def join(members: Path) -> Any:
    """As the default group, when others accept newcomers."""
    until(members.exists)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    os.environ["FIREFLYER_JOIN"] = str(members)
    dist.init_process_group("hfreduce", timeout=datetime.timedelta(seconds=60))
    return dist.group.WORLD


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(job: Job, step: int, point: str) -> None:
    """This process kills itself there, in the step behind `step` steps (between: behind it)."""

    def act(reached: str) -> None:
        done = job.model.elastic.steps
        if reached == point and done == step + (point == "between steps"):
            die()

    job.act = act


def deaths(seed: int, point: str) -> dict[int, tuple[int, str]]:
    """Two of four ranks, and when: at once (then not rank 0, without which there is no quorum), or one after
    the other."""
    dice = random.Random(f"{seed} {point}")
    step = dice.randint(0, STEPS - 4)
    if dice.random() < 0.5:
        one, other = dice.sample([1, 2, 3], 2)
        return {one: (step, point), other: (step, dice.choice(POINTS))}
    one, other = dice.sample(range(4), 2)
    return {one: (step, point), other: (step + 2, dice.choice(POINTS))}


@contextlib.contextmanager
def following() -> Iterator[list[tuple[list[int], int]]]:
    """Notes (progress of all ranks, leader) whenever this process takes part in handing states over."""
    seen: list[tuple[list[int], int]] = []
    original = Elastic._follow

    def follow(self: Elastic, progress: Any, leader: int, steps: int) -> None:
        seen.append((list(progress), leader))
        original(self, progress, leader, steps)

    Elastic._follow = follow  # type: ignore[method-assign]
    yield seen
    Elastic._follow = original  # type: ignore[method-assign]
