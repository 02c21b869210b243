"""Stacks of haiprof and of py-spy, taken of one training process at the same time.

`python -m tests.haiprof.against_py_spy --seconds 60` prints the share of the samples in which each function
is on the stack, for functions above 5 %. py-spy must be on PATH; it is not among the test packages.
"""

import argparse
import tempfile
import threading
from collections import Counter
from pathlib import Path

from tests.haiprof.scripts import PREPARE, running

from fireflyer.haiprof.attach.collect import Options, collect
from fireflyer.haiprof.attach.unprepared import read_stacks
from fireflyer.haiprof.records import Frame, RankProfile

SHOWN = 0.05

TRAINS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)
class Data(Dataset):
    def __len__(self): return 1 << 30
    def __getitem__(self, n): return tokens(n)
def tokens(n):
    text = "".join(str(n * k) for k in range(100))
    return torch.tensor([ord(c) % 64 for c in text[:64]])
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x): return x + self.down(nn.functional.gelu(self.up(x)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(64, 64), nn.Sequential(*(Block() for _ in range(4)))
    def forward(self, x): return self.blocks(self.embed(x))
def clip(model):
    for p in model.parameters(): p.grad.clamp_(-1, 1)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
def step(batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    clip(model)
    optimizer.step()
def train():
    for batch in DataLoader(Data(), batch_size=16): step(batch)
train()
"""


def shares(profile: RankProfile) -> dict[str, float]:
    """Returns the share of the training thread's samples with each function on the stack."""
    found: Counter[str] = Counter()
    total = 0
    for part in profile.stack_samples:
        if not part.main:
            continue
        for number, weight in zip(part.stacks, part.weights, strict=True):
            total += weight
            for name in {key(frame) for frame in profile.stacks[number].frames}:
                found[name] += weight
    return {name: count / total for name, count in found.items()}


def key(frame: Frame) -> str:
    """Returns a name that both profilers print."""
    return f"{Path(frame.file).name}:{frame.function.rpartition('.')[2]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAINS)
        start = PREPARE + f"exec(compile(open({str(script)!r}).read(), {str(script)!r}, 'exec'))"
        with running(start) as child:
            collect([child.pid], Options(seconds=60, most_steps=20, from_first_step=True))
            theirs: list[RankProfile] = []
            peer = threading.Thread(
                target=lambda: theirs.append(read_stacks(child.pid, seconds, 100.0))
            )
            peer.start()
            (ours,) = collect([child.pid], Options(seconds=seconds, recorders="basic"))
            peer.join()
    mine, others = shares(ours.profile), shares(theirs[0])
    worst = 0.0
    for name in sorted(mine.keys() | others.keys(), key=lambda n: -others.get(n, 0.0)):
        one, other = mine.get(name, 0.0), others.get(name, 0.0)
        if max(one, other) >= SHOWN:
            worst = max(worst, abs(one - other))
            print(f"{name:50} haiprof {one:6.1%}  py-spy {other:6.1%}")
    print(f"largest difference: {100 * worst:.1f} percentage points")


if __name__ == "__main__":
    main()
