"""Effect of low-bit wires on the loss: one small GPT on real text, trained once with each wire.

Two ranks are on two hosts that differ only in name (FIREFLYER_NODE), so gradients take the wire
between hosts, over loopback. Every run has the same start, samples and optimizer. Times have no
meaning here.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from fireflyer.bench.harness import curves, goals
from fireflyer.bench.harness.ranks import Session, on_ranks
from fireflyer.bench.harness.report import Row
from fireflyer.bench.train.models import Sizes
from fireflyer.demo import dataset
from fireflyer.demo.gpt import GPT, Block
from fireflyer.ffrecord import FileReader
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.fsdp import FullyShardedDataParallel

WINDOW = 20  # number of steps per mean
RANKS = 2
_LEAST = 1e-4  # percent; smaller differences, also 0, count as this value
FP32 = "ddp, float32 wire"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Spec:
    """Options of the training runs.

    Attributes:
        folder: folder in which the data set is made or found.
        text: folder of text for the data set; None: the sources of Python's standard library.
        batch: number of samples per rank.
        sizes: sizes of the model; the vocabulary is a maximum.
    """

    folder: Path
    text: Path | None = None
    steps: int = 500
    batch: int = 8
    lr: float = 2e-3
    sizes: Sizes = field(
        default_factory=lambda: Sizes(vocabulary=1024, context=128, width=128, layers=4, heads=4)
    )


@dataclass(frozen=True)
class Losses:
    """Losses in nats per token.

    Attributes:
        steps: loss of every step, over all ranks.
        held_out: loss of the held-out samples at the end.
    """

    steps: list[float]
    held_out: float


Wrapped = tuple[nn.Module, Optimizer]
Wrap = Callable[[GPT, Callable[[Any], Optimizer]], Wrapped]


def _ddp(wire: str | None) -> Wrap:
    def wrap(model: GPT, make: Callable[[Any], Optimizer]) -> Wrapped:
        optimizer = make(model.parameters())
        return DistributedDataParallel(model, optimizer=optimizer, wire=wire), optimizer

    return wrap


def _zero_3(model: GPT, make: Callable[[Any], Optimizer]) -> Wrapped:
    wrapped = FullyShardedDataParallel(
        model,
        optimizer=make,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        gather_dtype=torch.bfloat16,
        wire="bf16",
    )
    assert wrapped.optimizer is not None
    return wrapped, wrapped.optimizer


RUNS: dict[str, Wrap] = {
    FP32: _ddp(None),
    "ddp, bf16 wire": _ddp("bf16"),
    "ddp, int8 wire": _ddp("int8"),
    "ZeRO-3, bf16 both ways": _zero_3,
}


def run(spec: Spec, say: Say) -> dict[str, Losses]:
    """Trains every run of `RUNS` and returns its losses.

    Raises:
        ConfigError: the text is too short, or its folder is missing.
        FireflyerError: a rank failed.
    """
    say("text to records")
    data = on_ranks(1, lambda _: _prepare(spec))  # in a child, so no thread exists when ranks fork
    store = str(spec.folder / f"store-{os.getpid()}")

    def on_rank(rank: int) -> dict[str, Losses]:
        os.environ["FIREFLYER_NODE"] = f"host{rank}"
        with Session(store, rank, RANKS) as session:
            return {name: _train(session, spec, data, name, say) for name in RUNS}

    try:
        found: dict[str, Losses] = on_ranks(RANKS, on_rank)
    finally:
        Path(store).unlink(missing_ok=True)
    return found


def _prepare(spec: Spec) -> Path:
    settings = dataset.Settings(vocabulary=spec.sizes.vocabulary, context=spec.sizes.context)
    return dataset.prepare(dataset.read_text(spec.text), spec.folder, settings, lambda *_: None)


def _train(session: Session, spec: Spec, data: Path, name: str, say: Say) -> Losses:
    sizes, meta = spec.sizes, dataset.load_meta(data)
    torch.manual_seed(0)
    core = GPT(meta.vocabulary, sizes.context, sizes.width, sizes.layers, sizes.heads)
    model, optimizer = RUNS[name](core, partial(AdamW, lr=spec.lr, weight_decay=0.1, fused=True))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate, spec.steps))
    order = np.random.default_rng(0).permutation(meta.train_samples)
    losses = []
    with FileReader(data / "train.ffr") as records:
        for step in range(spec.steps):
            if session.rank == 0:
                say(f"{name}: step {step + 1} of {spec.steps}")
            first = (step * session.ranks + session.rank) * spec.batch
            numbers = [int(order[at % len(order)]) for at in range(first, first + spec.batch)]
            optimizer.zero_grad()
            loss = _loss(model, _read(records, numbers))
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(_mean(session, loss))
    with FileReader(data / "val.ffr") as records, torch.no_grad():
        number = range(min(records.n, 16 * spec.batch))
        held_out = [
            float(_loss(model, _read(records, list(number[at : at + spec.batch]))))
            for at in number[:: spec.batch]
        ]
    return Losses(losses, fmean(held_out))


def _rate(steps: int, step: int) -> float:
    """Returns the factor of the learning rate.

    The factor rises over the first 5 % of the steps, then falls to a tenth.
    """
    warm = max(1, steps // 20)
    return min((step + 1) / warm, 1.0 - 0.9 * max(0, step - warm) / max(1, steps - warm))


def _read(records: FileReader, numbers: list[int]) -> Tensor:
    data, _ = records.read_batch(numbers)
    return torch.from_numpy(data.reshape(len(numbers), -1).view("<u2").astype(np.int64))


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _mean(session: Session, loss: Tensor) -> float:
    whole = loss.detach().clone()
    dist.all_reduce(whole, group=session.gloo)
    return float(whole) / session.ranks


def smooth(losses: Sequence[float]) -> list[float]:
    """Returns, for each step, the mean of the last WINDOW steps, or of fewer steps at the start."""
    return [fmean(losses[max(0, end - WINDOW) : end]) for end in range(1, len(losses) + 1)]


def rows(found: dict[str, Losses]) -> list[Row]:
    """Returns rows of each run's distance from the float32 wire's loss, in percent of that loss."""
    reference = found[FP32]
    whole = smooth(reference.steps)
    result = []
    for name, losses in found.items():
        if name == FP32:
            continue
        mine = smooth(losses.steps)
        apart = [100 * abs(a - b) / b for a, b in zip(mine[WINDOW:], whole[WINDOW:], strict=True)]
        held_out = 100 * abs(losses.held_out - reference.held_out) / reference.held_out
        for what, percent in (
            (f"loss after {len(mine)} steps", apart[-1]),
            ("loss of held-out text", held_out),
            ("loss, the most", max(apart)),
        ):
            limits = [goals.WIRE_LOSS_PERCENT]
            case = f"{name}, {what}"
            result.append(
                Row.of_times(case, "%", [max(percent, _LEAST)], "allowed", limits, (), 1.0)
            )
    return result


def plot(found: dict[str, Losses]) -> str:
    """Returns the loss curves and their distances from the float32 wire's curve, as SVG text."""
    whole = smooth(found[FP32].steps)
    steps = len(whole)
    marks = [steps * part // 5 for part in range(6)]
    loss, apart = [], []
    for name, losses in found.items():
        mine = smooth(losses.steps)
        thin = range(WINDOW - 1, steps, max(1, steps // 250))
        loss.append(curves.Curve(name, [(at + 1, mine[at]) for at in thin]))
        points = [(at + 1, 100 * (mine[at] / whole[at] - 1)) for at in thin]
        apart.append(curves.Curve(name, points))
    top = max(y for curve in loss for _, y in curve.points)
    bottom = min(y for curve in loss for _, y in curve.points)
    limit = goals.WIRE_LOSS_PERCENT
    unit = f"nats a token, mean of {WINDOW} steps"
    return curves.draw(
        "Loss of a GPT on real text with low-bit wires",
        [
            curves.Panel(
                "Loss", unit, "step", loss, float(int(bottom)), float(int(top) + 1), marks
            ),
            curves.Panel("Apart from the float32 wire", "%", "step", apart, -limit, limit, marks),
        ],
    )
