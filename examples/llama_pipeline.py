"""Trains a model of LLaMa's shape with pipelines and replicas on pp x dp ranks.

fireflyer run --ranks 4 examples/llama_pipeline.py --stages 2
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.pipeline import PipeDream, make_subgroups, partition

WORDS, WIDTH, HEADS, LAYERS, LENGTH = 64, 64, 4, 4, 32


class Block(nn.Module):
    """Attention and SwiGLU, each after an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(rows, length, 3, HEADS, -1)
        query, key, value = qkv.transpose(1, 3).unbind(2)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns sequences in which each word determines the next word."""
    words = torch.randint(WORDS, (rows, 1), generator=torch.Generator().manual_seed(step))
    steps = [words]
    for _ in range(LENGTH):
        steps.append((steps[-1] * 5 + 3) % WORDS)
    sequence = torch.cat(steps, 1)
    return sequence[:, :-1], sequence[:, 1:]


def criterion(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches per step")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all ranks")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()

    dist.init_process_group("hfreduce")
    dp, pp = make_subgroups(pp_size=args.stages)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        *(Block() for _ in range(LAYERS)),
        nn.RMSNorm(WIDTH),
        nn.Linear(WIDTH, WORDS, bias=False),
    )
    stage = partition(model, pp.rank(), pp.size())
    pipe = PipeDream(DistributedDataParallel(stage, dp), args.chunks, pp)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    share = args.batch // dp.size()
    for step in range(1, args.steps + 1):
        x, labels = (rows[dp.rank() * share :][:share] for rows in batch(step, args.batch))
        optimizer.zero_grad()
        loss, _ = pipe.forward_backward(x, criterion=criterion, labels=labels)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step} of {args.steps}: loss {loss:.4f}, {args.stages} stages", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
