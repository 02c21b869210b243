"""Script whose phases sleep: it notes how long its statements took, for a comparison with haiprof's rows.

`python -m tests.haiprof.truth FILE` appends one JSON line a step: monotonic clock at the end of the step,
seconds by phase.
"""

import io
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fireflyer.haiprof.inside.prepare import prepare

SLEEPS = {
    "data": 0.10, "forward": 0.12, "backward": 0.15, "optimizer": 0.08, "checkpoint": 0.08,
    "other": 0.08,
}  # fmt: skip
PARTNER_S = 0.700
"""Time between two collectives of the other rank; this rank waits for it."""

spent: dict[str, float] = defaultdict(float)


@contextmanager
def noted(phase: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    spent[phase] += time.monotonic() - begin


def sleep(phase: str) -> None:
    time.sleep(SLEEPS[phase])


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        sleep("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sleep("backward")
        return grads[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Sleeping.apply(self.inner(x))  # type: ignore[no-untyped-call]
        return y


class Optimizer(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        sleep("optimizer")


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, number: int) -> torch.Tensor:
        sleep("data")
        return torch.ones(2)


class Disk(io.BytesIO):
    """Takes its time once a file."""

    def flush(self) -> None:
        sleep("checkpoint")


def partner(store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=1, world_size=2)
    try:
        while True:
            time.sleep(PARTNER_S)
            dist.all_reduce(torch.ones(1))
    finally:  # the other rank has ended
        os._exit(0)


def main(path: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, open(path, "a", buffering=1) as file:
        store = f"{folder}/store"
        if os.fork() == 0:
            partner(store)
        prepare()
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=0, world_size=2)
        model = Model()
        optimizer = Optimizer(model.parameters(), lr=0.1)
        ones = torch.ones(1)
        batches = iter(DataLoader(Samples()))
        while True:
            with noted("data"):
                batch = next(batches)
            with noted("forward"):
                loss = model(batch).sum()
            with noted("backward"):
                loss.backward()
            with noted("communication"):
                dist.all_reduce(ones)
            with noted("optimizer"):
                optimizer.step()
            file.write(json.dumps([time.monotonic(), spent]) + "\n")
            spent.clear()
            with noted("checkpoint"):
                torch.save({"x": 1}, Disk())
            with noted("other"):
                sleep("other")


if __name__ == "__main__":
    main(sys.argv[1])
