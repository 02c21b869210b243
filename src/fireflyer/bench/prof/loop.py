"""Script that the benchmark profiles: a plain training loop that records the time of each step.

`python -m fireflyer.bench.prof.loop BOARD`
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import monotonic_ns, process_time_ns, thread_time_ns

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fireflyer.bench.prof.board import PLAIN, TORCH_STACKS, Board
from fireflyer.haiprof.inside.prepare import prepare

TRACED_STEPS = 10
WIDTH, LAYERS, BATCH = 32, 6, 16


@contextmanager
def torch_profiler(stacks: bool) -> Iterator[None]:
    """Records with torch.profiler and exports the trace, as in torch's documentation."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, with_stack=stacks) as found:
        yield
    with tempfile.TemporaryDirectory() as folder:
        found.export_chrome_trace(str(Path(folder, "trace.json")))


def main(path: str) -> None:
    """Trains until the process is killed."""
    prepare()
    board = Board(Path(path))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    data = TensorDataset(torch.randn(4096, WIDTH), torch.randint(10, (4096,)))
    loader = DataLoader(data, BATCH)

    def batches() -> Iterator[list[torch.Tensor]]:
        while True:
            yield from loader

    def step(batch: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        optimizer.step()
        scheduler.step()
        board.add(monotonic_ns(), process_time_ns(), thread_time_ns())

    endless = batches()
    while True:
        command = board.command
        traced = nullcontext() if command == PLAIN else torch_profiler(command == TORCH_STACKS)
        with traced:
            for _ in range(1 if command == PLAIN else TRACED_STEPS):
                step(next(endless))
        if command != PLAIN:
            board.command = PLAIN


if __name__ == "__main__":
    main(sys.argv[1])
