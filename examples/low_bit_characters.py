"""Trains a GRU of few bits on the characters of Python's source, with balanced and plain bins.

python examples/low_bit_characters.py
python examples/low_bit_characters.py --bits 4 --steps 2000
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fireflyer.nn.quant import Bits, Recurrent, bin_entropy


class CharacterModel(nn.Module):
    """Model from characters [time, batch] to logits [time, batch, 128]."""

    def __init__(self, width: int, bits: Bits) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.gru = Recurrent("GRU", width, width, bits)
        self.head = nn.Linear(width, 128)

    def forward(self, characters: Tensor) -> Tensor:
        logits: Tensor = self.head(self.gru(self.embedding(characters))[0])
        return logits


def text() -> Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = (folder / f"{name}.py" for name in ("argparse", "inspect", "typing"))
    whole = "".join(file.read_text() for file in files)
    return torch.tensor(list(whole.encode()), dtype=torch.uint8).long() % 128


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:-1]).flatten(0, 1), batch[1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--bits", type=int, default=2, help="bits of weights and states")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--length", type=int, default=32, help="characters per sample")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    codes = text()
    known, unseen = codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]
    span = args.length + 1
    rows = unseen[: len(unseen) // span * span].view(-1, span).t()
    variants = {
        "float32": Bits(),
        "plain": Bits(args.bits, args.bits),
        "balanced": Bits(args.bits, args.bits, balanced="median", scale="fit"),
    }
    for name, bits in variants.items():
        torch.manual_seed(args.seed)
        model = CharacterModel(args.width, bits)
        adam = torch.optim.Adam(model.parameters(), 5e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 5e-3, args.steps)
        for _ in range(args.steps):
            starts = torch.randint(len(known) - span, (32,))
            loss = loss_of(model, known[starts + torch.arange(span)[:, None]])
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            schedule.step()
        with torch.no_grad():
            perplexity = math.exp(loss_of(model, rows))
        full = bin_entropy(model.gru.weight_hh_l0, args.bits)
        print(f"{name}: perplexity {perplexity:.3f}, entropy of balanced bins {full:.3f} bit")


if __name__ == "__main__":
    main()
