"""Trains a language model with mixtures of experts that are split over the ranks.

fireflyer run --ranks 2 examples/moe_gpt.py
fireflyer run --ranks 4 examples/moe_gpt.py --text book.txt --experts 16
"""

import argparse
import pydoc_data
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from fireflyer import hai
from fireflyer.checkpoint import CheckpointManager
from fireflyer.haiscale.expert import MoE, average_gradients
from fireflyer.haiscale.tensor import clip_grad_norm_, optimizer_state

WIDTH, HEADS, LAYERS = 64, 4, 2


class Block(nn.Module):
    """Attention, then experts, each after an RMSNorm."""

    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.moe = MoE(WIDTH, WIDTH, experts, top_k, shared=1, wire=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(rows, length, 3, HEADS, -1)
        query, key, value = qkv.transpose(1, 3).unbind(2)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.moe(self.norms[1](x))


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self, experts: int, top_k: int, context: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, WIDTH), nn.Embedding(context, WIDTH)
        self.blocks = nn.ModuleList(Block(experts, top_k) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, manual = parser.add_argument, Path(*pydoc_data.__path__, "topics.py")
    add("--text", type=Path, default=manual, help="text to learn, byte by byte")
    add("--directory", type=Path, default=hai.task().output / "moe", help="checkpoints")
    add("--experts", type=int, default=8, help="experts per layer, a multiple of the ranks")
    add("--top-k", type=int, default=2, help="experts per byte")
    add("--steps", type=int, default=100, help="steps of training")
    add("--batch", type=int, default=16, help="samples per step, over all ranks")
    add("--context", type=int, default=64, help="bytes per sample")
    return parser.parse_args()


def main() -> None:
    args = options()
    dist.init_process_group("hfreduce")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(args.experts, args.top_k, args.context)
    layers = [block.moe for block in model.blocks]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    begin = time.perf_counter()
    for step in range(1, args.steps + 1):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(data) - args.context, (args.batch,), generator=generator)
        rows = torch.stack([data[at : at + args.context] for at in starts[rank::ranks]])
        optimizer.zero_grad()
        logits = model(rows)[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        (loss + 0.01 * sum(layer.aux_loss for layer in layers)).backward()
        average_gradients(model)  # experts over their replicas, other parameters over all ranks
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        loads = [layer.take_loads() for layer in layers]
        if step % 10 == 0:
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            uneven = max(float(load.max() / load.float().mean()) for load in loads)
            rate = step * args.batch / (time.perf_counter() - begin)
            told = f"loss {mean:.4f}, busiest expert {uneven:.2f}x the mean, {rate:.0f} samples/s"
            if rank == 0:
                print(f"step {step} of {args.steps}: {told}", flush=True)
    state = {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}
    CheckpointManager(args.directory).save(args.steps, state).wait()  # loads on any number of ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
