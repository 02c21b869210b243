"""hfai's init and try_save: a run that is asked to leave anywhere goes on bit for bit."""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.conftest import Machine
from tests.checkpoint.integrations.callbacks.page import run_example
from torch import nn

from fireflyer.checkpoint import CheckpointManager, rng
from fireflyer.checkpoint.integrations import hfai
from fireflyer.errors import CheckpointError, ConfigError

STEPS, EPOCHS = 4, 3


class Left(BaseException):
    """As SystemExit, which `hai.suspended` raises."""


class Training:
    """A model with dropout, its optimizer, scheduler and scaler, from a seed."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.losses: list[float] = []

    def step(self, *_: int) -> None:
        noise = random.random() + float(np.random.rand())
        loss = self.model(torch.rand(8, 4) + noise).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.losses.append(loss.item())

    def run(self, path: Path, leave_after: int | None = None) -> Any:
        """Trains to the end, or until `leave_after` steps; returns the `others` it began with."""
        start_epoch, start_step, others = hfai.init(
            self.model,
            self.optimizer,
            self.scheduler,
            self.scaler,
            ckpt_path=path,
            should_suspend=lambda: len(self.losses) == leave_after,
            on_suspend=self._leave,
        )
        for epoch in range(start_epoch, EPOCHS):
            for step in range(start_step, STEPS):
                self.step()
                saved = self.model.try_save(epoch, step + 1, {"losses": list(self.losses)})
                assert not saved
            start_step = 0
        return others

    def _leave(self) -> None:
        raise Left


def test_types_of_other_libraries_are_saved_as_plain_ones(tmp_path: Path) -> None:
    """MultiStepLR's state has a Counter; a rate computed with numpy is no float."""

    def training(seed: int) -> Training:
        made = Training(seed)
        rate = np.float64(0.1)
        made.optimizer = torch.optim.AdamW(made.model.parameters(), lr=rate)
        made.scheduler = torch.optim.lr_scheduler.MultiStepLR(made.optimizer, [2, 2, 5], gamma=0.5)
        return made

    expected = training(1)
    expected.run(tmp_path / "whole")
    first = training(1)
    with pytest.raises(Left):
        first.run(tmp_path / "cut", 2)
    again = training(2)
    again.run(tmp_path / "cut")
    assert first.losses + again.losses == expected.losses
    assert again.scheduler.state_dict() == expected.scheduler.state_dict()
    again.model.try_save(9, 0, {"best": np.float64(0.5), "at": tmp_path}, force=True)
    assert training(3).run(tmp_path / "cut") == {"best": 0.5, "at": str(tmp_path)}


@pytest.mark.parametrize("leave_after", [1, 2])
def test_a_suspended_run_goes_on_bit_for_bit(tmp_path: Path, leave_after: int) -> None:
    expected = Training(1)
    assert expected.run(tmp_path / "whole") is None
    first = Training(1)
    with pytest.raises(Left):
        first.run(tmp_path / "cut", leave_after)
    assert CheckpointManager(tmp_path / "cut").latest() == leave_after
    again = Training(2)
    others = again.run(tmp_path / "cut")
    assert others == {"losses": first.losses}
    assert first.losses + again.losses == expected.losses
    for a, b in zip(again.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert again.scaler.get_scale() == expected.scaler.get_scale() > 8


def test_try_save_saves_only_when_asked(tmp_path: Path) -> None:
    training = Training(1)
    assert hfai.init(training.model, training.optimizer, ckpt_path=tmp_path) == (0, 0, None)
    assert training.model.try_save(0, 1) is False
    assert CheckpointManager(tmp_path).latest() is None
    assert training.model.try_save(0, 2, others=[1, "two"], force=True) is True
    again = Training(2)
    assert hfai.init(again.model, again.optimizer, ckpt_path=tmp_path) == (0, 2, [1, "two"])


def test_what_the_nodes_hold_in_memory_is_found(machine: Machine, tmp_path: Path) -> None:
    place = tmp_path / "run"
    training = Training(1)
    hfai.init(training.model, training.optimizer, ckpt_path=place, memory=True)
    training.model.try_save(0, 2, others="kept", force=True)
    shutil.rmtree(place / "step-000000000001")
    again = Training(2)
    assert hfai.init(again.model, again.optimizer, ckpt_path=place) == (0, 0, None)
    found = hfai.init(again.model, again.optimizer, ckpt_path=place, memory=True)
    assert found == (0, 2, "kept")


def test_other_arguments_than_then_are_refused(tmp_path: Path) -> None:
    training = Training(1)
    hfai.init(training.model, training.optimizer, ckpt_path=tmp_path)
    training.model.try_save(0, 1, force=True)
    with pytest.raises(ConfigError, match="of model, optimizer into model, optim"):
        hfai.init(training.model, training.optimizer, training.scheduler, ckpt_path=tmp_path)


@pytest.mark.parametrize(
    ("state", "saver"),
    [
        ({"x": 1}, "a CheckpointManager of its own"),
        ([1], "a CheckpointManager of its own"),
        ({"lightning": {}, "mid_epoch": False}, r"fireflyer\.checkpoint\.integrations\.lightning;"),
        (
            {"model": {}, "optimizer": {}, "scheduler": {}, "trainer_state": "{}"},
            r"fireflyer\.checkpoint\.integrations\.transformers;",
        ),
    ],
)
def test_checkpoints_of_others_are_refused(tmp_path: Path, state: Any, saver: str) -> None:
    CheckpointManager(tmp_path).save(1, state).wait()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match=f"hfai cannot load .* saved by {saver}"):
        hfai.init(model, optimizer, ckpt_path=tmp_path)


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FIREFLYER_CONTROL", raising=False)
    for steps_done in (3 * STEPS, 0):
        training = Training(1)
        names = run_example(
            "hfai",
            {
                "model": training.model,
                "optimizer": training.optimizer,
                "scheduler": training.scheduler,
                "steps": STEPS,
                "train_step": training.step,
            },
        )
        assert len(training.losses) == steps_done
    assert [names["start_epoch"], names["best"]] == [3, None]


def test_random_numbers_go_on(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.randn()), torch.rand(()).item()]

    draw()  # leaves one of a pair of normal numbers over
    manager = CheckpointManager(tmp_path)
    manager.save(1, {}, per_rank=rng.capture()).wait()
    expected = [draw() for _ in range(3)]
    manager.load()
    own = manager.loaded_per_rank()
    assert own is not None
    rng.restore(own)
    assert [draw() for _ in range(3)] == expected
