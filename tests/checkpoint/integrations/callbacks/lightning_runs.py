"""Interrupted runs of lightning end bit-equal to uninterrupted ones; test_callbacks.py runs this.

lightning_runs.py DIRECTORY
"""

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from tests.checkpoint.integrations.callbacks.page import run_example
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.integrations.lightning import FireflyerCheckpoint
from fireflyer.errors import CheckpointError

BATCHES = 6


class Stop(Exception):
    pass


class Model(LightningModule):  # type: ignore[misc]  # untyped here
    def __init__(self, stop_at: int | None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["stop_at"])
        self.net = nn.Sequential(
            nn.Linear(4, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 1)
        )
        self.stop_at = stop_at
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == self.stop_at:
            raise Stop
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7, 11], gamma=0.3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Resumable:
    """Batches in a seeded order of their own for each epoch, from wherever `load_state_dict` says."""

    def __init__(self, data: TensorDataset) -> None:
        self._data, self._epoch, self._next = data, 0, 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[Tensor]]:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self._epoch)).view(-1, 4)
        while self._next < BATCHES:
            self._next += 1
            yield list(self._data[order[self._next - 1]])
        self._epoch, self._next = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._next = state["epoch"], state["next"]


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(24, 4, generator=made), torch.randn(24, 1, generator=made))


def shuffled() -> Any:
    return DataLoader(data(), batch_size=4, shuffle=True)


def resumable() -> Any:
    return Resumable(data())


def fit(
    seed: int,
    loader: Any,
    checkpoints: FireflyerCheckpoint | None,
    stop_at: int | None = None,
    **options: Any,
) -> Model:
    torch.manual_seed(seed)
    model = Model(stop_at)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[] if checkpoints is None else [checkpoints],
        enable_checkpointing=checkpoints is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, **options},
    )
    path = None if checkpoints is None else checkpoints.newest
    try:
        trainer.fit(model, loader, DataLoader(data(), batch_size=8), ckpt_path=path)
    except Stop:
        assert checkpoints is not None
        checkpoints.manager.wait()
    return model


def assert_same(model: Model, expected: Model, steps: int) -> None:
    assert model.seen == expected.seen[-steps:], (model.seen, expected.seen)
    for (name, a), b in zip(
        model.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    states = (m.optimizers().optimizer.state_dict()["state"] for m in (model, expected))
    for a, b in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in b)


def interrupted(
    directory: Path,
    loader: Callable[[], Any],
    every: int,
    stop_at: int,
    resumes_at: int,
    accumulate: int = 1,
) -> None:
    """All in optimizer steps, of `accumulate` batches each."""
    options = {"accumulate_grad_batches": accumulate}
    expected = fit(1, loader(), None, **options)
    fit(1, loader(), FireflyerCheckpoint(directory, every=every), stop_at=stop_at, **options)
    again = FireflyerCheckpoint(directory, every=every)
    assert again.manager.latest() == resumes_at
    model = fit(2, loader(), again, **options)
    assert_same(model, expected, len(expected.seen) - resumes_at * accumulate)


def suspended(directory: Path) -> None:
    expected = fit(1, resumable(), None)
    answers = iter([False, True])  # asked at the first two steps, then by the pace
    leaving = FireflyerCheckpoint(directory, every=None, should_suspend=lambda: next(answers, True))
    first = fit(1, resumable(), leaving)
    assert leaving.manager.suspending
    left_at = leaving.manager.latest()
    assert left_at == len(first.seen) < len(expected.seen)
    called: list[int] = []
    again = FireflyerCheckpoint(directory, every=None, on_suspend=lambda: called.append(1))
    assert_same(fit(2, resumable(), again), expected, len(expected.seen) - left_at)
    assert not called


def ended(directory: Path, loader: Callable[[], Any], **limits: int) -> None:
    """A fit that is over before a save is due leaves its last step, and goes on from there."""
    expected = fit(1, loader(), None)
    first = fit(1, loader(), FireflyerCheckpoint(directory, every="1h"), **limits)
    again = FireflyerCheckpoint(directory, every="1h")
    assert again.manager.latest() == len(first.seen) < len(expected.seen)
    assert_same(fit(2, loader(), again), expected, len(expected.seen) - len(first.seen))
    assert again.manager.steps() == [len(first.seen), len(expected.seen)]


def in_memory(directory: Path) -> None:
    """What storage has lost goes on from memory."""
    expected = fit(1, resumable(), None)
    first = fit(1, resumable(), FireflyerCheckpoint(directory, every=4, memory=True), max_steps=9)
    assert len(first.seen) == 9
    for step in directory.glob("step-*"):
        shutil.rmtree(step)
    assert FireflyerCheckpoint(directory).newest is None
    again = FireflyerCheckpoint(directory, every=4, memory=True)
    assert_same(fit(2, resumable(), again), expected, len(expected.seen) - 9)


def of_others(directory: Path) -> None:
    CheckpointManager(directory).save(1, {"x": 1}).wait()
    with pytest.raises(CheckpointError, match=r"lightning cannot load .* by a CheckpointManager"):
        fit(1, shuffled(), FireflyerCheckpoint(directory))


def example() -> None:
    expected = fit(1, shuffled(), None)
    torch.manual_seed(1)
    names = run_example("Lightning", {"model": Model(None), "loader": shuffled()})
    assert len(names["model"].seen) == len(expected.seen) > 0


def main(directory: Path) -> None:
    warnings.simplefilter("ignore")
    assert FireflyerCheckpoint(directory / "none").newest is None
    interrupted(directory / "epoch", shuffled, every=6, stop_at=9, resumes_at=6)
    interrupted(directory / "middle", resumable, every=4, stop_at=9, resumes_at=8)
    interrupted(directory / "few", resumable, every=2, stop_at=5, resumes_at=4, accumulate=2)
    suspended(directory / "suspended")
    ended(directory / "short", shuffled, max_epochs=2)
    ended(directory / "steps", resumable, max_steps=9)
    in_memory(directory / "memory")
    of_others(directory / "others")
    example()
    print("lightning: ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
