"""Low-bit training: scikit-learn's digits, and a character model of Python's standard library.

"1-2-6 bits" means 1 bit for weights, 2 bits for activations and 6 bits for gradients.
"""

import importlib
import math
import statistics
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fireflyer.bench.harness.report import Row
from fireflyer.nn.quant import Bits, Conv2d, Recurrent, bin_entropy

WITHIN, AIM = 1.0, 0.3
"""Allowed difference of accuracy in percentage points, and the aim."""


def digits(seeds: int, epochs: int, said: Callable[[str], None]) -> list[Row]:
    """Trains a convolutional net with 1-2-6 bits and in float32; reports accuracy in percent."""
    try:
        load_digits = importlib.import_module("sklearn.datasets").load_digits
    except ModuleNotFoundError:
        reason = "scikit-learn is missing"
        return [
            Row(
                case="digits, 1-2-6 bits", unit="%", ours=math.nan, peer=reason, peer_value=None,
                ratio=None, bound=None, of_bound=None, rounds=0, spread=1, goal=None,
            )
        ]  # fmt: skip
    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    pictures = pixels.float().view(-1, 1, 8, 8) / 16
    tested = torch.arange(len(labels)) % 4 == 3
    found: dict[str, list[float]] = {}
    for name, bits in {"low": Bits(1, 2, 6), "float32": Bits()}.items():
        for seed in range(seeds):
            said(f"digits, {name}, seed {seed}")
            net = _digits_net(bits, seed)
            _fit(net, pictures[~tested], labels[~tested], epochs)
            right = (net.eval()(pictures[tested]).argmax(1) == labels[tested]).float().mean()
            found.setdefault(name, []).append(100 * right.item())
    low, full = (statistics.mean(found[name]) for name in ("low", "float32"))
    return [
        Row(
            case=f"digits, 1-2-6 bits, {seeds} seeds, standard errors "
            f"{_error(found['low']):.2f} and {_error(found['float32']):.2f}",
            unit="%", ours=low, peer="float32", peer_value=full, ratio=low / full, bound=None,
            of_bound=None, rounds=seeds, spread=max(found["low"]) / min(found["low"]),
            goal=(full - WITHIN) / full, aim=(full - AIM) / full,
        )
    ]  # fmt: skip


def _digits_net(bits: Bits, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)),
        *(Conv2d(32, 64, 3, bits, padding=1, bias=False), nn.BatchNorm2d(64), nn.MaxPool2d(2)),
        *(Conv2d(64, 64, 3, bits, padding=1, bias=False), nn.BatchNorm2d(64), nn.MaxPool2d(2)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)),
    )


def _fit(net: nn.Module, pictures: Tensor, labels: Tensor, epochs: int, batch: int = 64) -> None:
    steps = epochs * (len(labels) // batch)
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 1e-2, steps)
    for _ in range(epochs):
        for some in torch.randperm(len(labels))[: len(labels) // batch * batch].split(batch):
            adam.zero_grad()
            cross_entropy(net(pictures[some]), labels[some]).backward()
            adam.step()
            schedule.step()


def _error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


class CharacterModel(nn.Module):
    """Embedding, one GRU of few bits, and logits: [time, batch] to [time, batch, characters]."""

    def __init__(self, characters: int, width: int, bits: Bits) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.gru = Recurrent("GRU", width, width, bits)
        self.head = nn.Linear(width, characters)

    def forward(self, characters: Tensor) -> Tensor:
        logits: Tensor = self.head(self.gru(self.embedding(characters))[0])
        return logits


VARIANTS = {
    "float32": Bits(),
    "plain": Bits(2, 2),
    "balanced": Bits(2, 2, balanced="median", scale="fit"),
    "balanced, mean": Bits(2, 2, balanced="mean", scale="fit"),
}


def characters(seeds: int, steps: int, said: Callable[[str], None]) -> list[Row]:
    """Trains character models with 2-bit weights and states; reports perplexity of unseen text."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(
        (folder / f"{name}.py").read_text() for name in ("argparse", "inspect", "typing")
    )
    codes = torch.tensor(list(text.encode()), dtype=torch.uint8).long() % 128
    cut = len(codes) * 9 // 10
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    entropies = []
    for seed in range(seeds):
        for name, bits in VARIANTS.items():
            said(f"characters, {name}, seed {seed}")
            torch.manual_seed(seed)
            model = CharacterModel(128, 96, bits)
            found[name].append(_perplexity(model, codes[:cut], codes[cut:], steps))
            if name == "balanced":
                entropies.append(bin_entropy(model.gru.weight_hh_l0, 2))
    plain = found["plain"]
    rows = []
    for name, values in found.items():
        if name != "plain":
            differences = [b - a for a, b in zip(values, plain, strict=True)]
            case = (
                f"characters, {name}, {seeds} seeds: plain minus this one "
                f"{statistics.mean(differences):.3f} +/- {_error(differences):.3f}"
            )
            goal = 1.0 if name == "balanced" else None
            rows.append(Row.of_times(case, "perplexity", values, "plain", plain, (), goal))
    rows.append(
        Row.of_speeds(
            "entropy of the balanced bins", "bit", entropies, "bits", [2.0] * seeds, (), 0.98
        )
    )
    return rows


def _perplexity(model: CharacterModel, text: Tensor, unseen: Tensor, steps: int) -> float:
    adam = torch.optim.Adam(model.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 5e-3, steps)
    for _ in range(steps):
        starts = torch.randint(len(text) - 33, (32,))
        batch = text[starts + torch.arange(33)[:, None]]
        adam.zero_grad()
        cross_entropy(model(batch[:-1]).flatten(0, 1), batch[1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()
    rows = unseen[: len(unseen) // 33 * 33].view(-1, 33).t()
    with torch.no_grad():
        loss = cross_entropy(model(rows[:-1]).flatten(0, 1), rows[1:].flatten())
    return math.exp(loss.item())
