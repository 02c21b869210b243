"""Trains a small GPT on FFRecord samples: the demo's script, and a starting point for your own.

fireflyer run --nodes 2 gpt.py --data DATASET --seconds 120
torchrun --nproc-per-node 2 gpt.py --data DATASET --steps 500
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fireflyer import hai
from fireflyer.checkpoint import CheckpointManager, SaveHandle
from fireflyer.demo.muon import Muon
from fireflyer.demo.sample import write_text
from fireflyer.ffrecord import FileReader
from fireflyer.haiscale.ddp import DistributedDataParallel


class Block(nn.Module):
    """Block with causal attention (rotary positions), then a squared-ReLU MLP.

    Input and output have the shape [batch, time, width].
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.out.weight)  # a block starts as the identity
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        batch, time_, width = x.shape
        qkv = self.qkv(norm(x)).view(batch, time_, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            rotate(norm(q), turn), rotate(norm(k), turn), v, is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, time_, width))
        mlp: Tensor = self.down(F.relu(self.up(norm(x))).square())
        return x + mlp


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotates the pairs of [..., time, size] by `turn` [2, context, size / 2], cosines and sines."""
    cos, sin = turn[:, : x.size(-2)]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class GPT(nn.Module):
    """Model from tokens [batch, time] to logits [batch, time, vocabulary]."""

    turn: Tensor

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.zeros_(self.head.weight)
        pairs = width // heads // 2
        angles = torch.outer(torch.arange(context), 1e-3 ** (torch.arange(pairs) / pairs))
        self.register_buffer("turn", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = norm(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, self.turn)
        logits: Tensor = self.head(norm(x))
        return logits


def sample_numbers(position: int, count: int, total: int, seed: int) -> list[int]:
    """Returns `count` sample numbers, beginning with number `position` of an endless sequence.

    The sequence consists of seeded shuffles of range(total).
    """
    numbers: list[int] = []
    while len(numbers) < count:
        epoch, offset = divmod(position + len(numbers), total)
        order = np.random.default_rng((seed, epoch)).permutation(total)
        numbers += order[offset : offset + count - len(numbers)].tolist()
    return numbers


def read(records: FileReader, numbers: list[int]) -> Tensor:
    """Reads samples as tokens [len(numbers), context + 1]."""
    data, _ = records.read_batch(numbers)
    return torch.from_numpy(data.view("<u2").reshape(len(numbers), -1).astype(np.int64))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the mean cross entropy, in nats, of tokens [batch, context + 1]."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def learning_rate(done: float, warm_up: float = 0.02) -> float:
    """Returns the factor of the peak learning rate after the share `done` of the training.

    The factor rises, stays level, then falls to 5 %.
    """
    return min(1.0, (done + 1e-3) / warm_up, max(0.05, 1.9 * (1 - done)))


class Trainer:
    """Model, optimizers and data position: the content of a checkpoint."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        self.meta = json.loads((args.data / "meta.json").read_text())
        self.records = FileReader(args.data / "train.ffr")
        torch.manual_seed(args.seed)  # the same weights on every rank
        vocabulary, context = self.meta["vocabulary"], self.meta["context"]
        self.model = GPT(vocabulary, context, args.width, args.layers, args.heads)
        self.ddp = DistributedDataParallel(self.model, broadcast_buffers=False)
        matrices = list(self.model.blocks.parameters())
        ends = [self.model.embedding.weight, self.model.head.weight]
        self.optimizers = [Muon(matrices, args.lr), torch.optim.AdamW(ends, args.lr)]
        self.step, self.trained_s = 0, 0.0
        self.handle: SaveHandle | None = None
        self.checkpoints = CheckpointManager(directory, every=args.save_every, keep=3)
        if self.checkpoints.latest() is not None:
            state = self.checkpoints.load()
            self.step, self.trained_s = state["step"], state["trained_s"]
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        self.saved = self.durable = self.step
        self.begun = time.monotonic() - self.trained_s

    def save(self) -> None:
        if self.step != self.saved:
            state: dict[str, Any] = {"step": self.step, "trained_s": self.trained_s}
            optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
            model = self.model.state_dict()
            state |= {"model": model, "optimizers": optimizers}
            self.handle = self.checkpoints.save(self.step, state)
            self.saved = self.step

    def done(self) -> float:
        """Returns the completed share of the training; equal on every rank."""
        return float(max(self.step / self.args.steps, self.trained_s / self.args.seconds))

    def train_step(self) -> dict[str, Any]:
        """Runs one step; saves a checkpoint if a save is due. Returns a line for metrics.jsonl."""
        args, started, waited_s = self.args, time.monotonic(), self.ddp.reducer.times.exposed_s
        first = (self.step * self.world + self.rank) * args.batch
        numbers = sample_numbers(first, args.batch, self.records.n, args.seed)
        loss = loss_of(self.ddp, read(self.records, numbers))
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = args.lr * learning_rate(self.done())
            optimizer.step()
        self.ddp.zero_grad()
        self.step += 1

        # One small reduction carries the mean loss and rank 0's clock. By that clock all ranks
        # agree on the end of the training, so no rank waits for a rank that has left.
        now = time.monotonic()
        clock = now - self.begun if self.rank == 0 else 0.0
        shared = torch.tensor([loss.item() / self.world, clock], dtype=torch.float64)
        dist.all_reduce(shared)
        mean_loss, self.trained_s = shared.tolist()
        reduced = time.monotonic()
        if save_now := self.checkpoints.should_save(self.step):
            self.save()
        elif self.handle is not None and self.handle.done:
            self.durable = self.handle.step
        ended = time.monotonic()
        return {
            "step": self.step,
            "loss": mean_loss,
            "tokens": self.world * args.batch * self.meta["context"],
            "step_s": ended - started,
            "comm_s": self.ddp.reducer.times.exposed_s - waited_s + reduced - now,
            "monotonic": ended,
            "wall": time.time(),
            "trained_s": self.trained_s,
            "checkpoint_step": self.durable or None,
            "checkpoint_stall_s": ended - reduced if save_now else None,
        }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT.")
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with train.ffr and meta.json")
    add("--seconds", type=float, default=math.inf, help="end after this time of training")
    add("--steps", type=int, default=100_000, help="end after this many steps")
    add("--batch", type=int, default=8, help="samples per rank and step")
    add("--width", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=0.02, help="peak of the learning rate")
    add("--save-every", default="5s", help="time between checkpoints")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args, task = options(), hai.task()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("hfreduce")
    else:
        dist.init_process_group("hfreduce", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    trainer = Trainer(args, task.output / "checkpoints")
    log = (task.output / "metrics.jsonl").open("a", buffering=1)  # each line is one write
    suspend = False
    while trainer.done() < 1 and not (suspend := hai.suspend_requested()):
        line = trainer.train_step()
        if trainer.rank == 0:
            log.write(json.dumps({**line, "attempt": task.attempt}) + "\n")
    trainer.save()
    trainer.checkpoints.wait()
    dist.destroy_process_group()
    if suspend:
        hai.suspended()
    if trainer.rank == 0:
        held_out = FileReader(args.data / "val.ffr")
        with torch.no_grad():
            loss = loss_of(trainer.model, read(held_out, list(range(held_out.n)))).item()
        (task.output / "result.json").write_text(json.dumps({"val_loss": loss}))
        text = write_text(trainer.model, args.data, trainer.meta["context"])
        (task.output / "sample.txt").write_text(text)


if __name__ == "__main__":
    main()
