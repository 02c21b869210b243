"""Interrupted runs of transformers end bit-equal to uninterrupted ones; test_callbacks.py runs this.

transformers_runs.py DIRECTORY
"""

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.integrations.callbacks.page import run_example
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.integrations.transformers import FireflyerCallback
from fireflyer.errors import CheckpointError, ConfigError

TIMES = {
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "train_loss",
    "total_flos",
} | {f"eval_{name}" for name in ("runtime", "samples_per_second", "steps_per_second")}


class Stop(Exception):
    pass


class StopAt(TrainerCallback):  # type: ignore[misc]  # untyped here
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Stop


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.net(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


class Data(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        made = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(24, 4, generator=made), torch.randn(24, 1, generator=made)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


def train(
    seed: int,
    directory: Path,
    callback: FireflyerCallback | None = None,
    stop_at: int | None = None,
    **options: Any,
) -> Trainer:
    torch.manual_seed(seed)
    options = {"per_device_train_batch_size": 4, "logging_steps": 1, **options}
    args = TrainingArguments(
        output_dir=str(directory / "trainer"),
        num_train_epochs=3,
        learning_rate=0.05,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model=Model(),
        args=args,
        train_dataset=Data(),
        eval_dataset=Data(),
        callbacks=[StopAt(stop_at), *([] if callback is None else [callback])],
    )
    try:
        trainer.train(resume_from_checkpoint=None if callback is None else callback.newest())
    except Stop:
        assert callback is not None
        callback.manager.wait()
    return trainer


def assert_same(trainer: Trainer, expected: Trainer) -> None:
    for (name, a), b in zip(
        trainer.model.state_dict().items(), expected.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    states = (one.optimizer.state_dict()["state"] for one in (trainer, expected))
    for x, y in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(x[key], y[key]) for key in y)
    assert trainer.lr_scheduler.state_dict() == expected.lr_scheduler.state_dict()
    logs = [
        [
            {key: value for key, value in log.items() if key not in TIMES}
            for log in one.state.log_history
        ]
        for one in (trainer, expected)
    ]
    assert logs[0] == logs[1], logs


def interrupted(directory: Path, every: int, stop_at: int, resumes_at: int, **options: Any) -> None:
    expected = train(1, directory, **options)
    last = expected.state.global_step
    train(1, directory, FireflyerCallback(directory / "c", every=every), stop_at, **options)
    again = FireflyerCallback(directory / "c", every=every)
    assert again.manager.latest() == resumes_at
    assert_same(train(2, directory, again, **options), expected)
    assert again.manager.latest() == last, "the last step is always saved"


def suspended(directory: Path) -> None:
    expected = train(1, directory)
    answers = iter([False, True])  # asked at the first two steps, then by the pace
    called: list[int] = []
    leaving = FireflyerCallback(
        directory / "c",
        every=None,
        should_suspend=lambda: next(answers, True),
        on_suspend=lambda: called.append(1),
    )
    first = train(1, directory, leaving)
    assert called == [1]
    assert leaving.manager.latest() == first.state.global_step < expected.state.global_step
    assert_same(train(2, directory, FireflyerCallback(directory / "c", every=None)), expected)


def in_memory(directory: Path) -> None:
    """What storage has lost goes on from memory."""
    expected = train(1, directory)
    train(1, directory, FireflyerCallback(directory / "c", every=4, memory=True), 9)
    for step in (directory / "c").glob("step-*"):
        shutil.rmtree(step)
    assert FireflyerCallback(directory / "c").newest() is None
    again = FireflyerCallback(directory / "c", every=4, memory=True)
    assert again.manager.latest() == 8
    assert_same(train(2, directory, again), expected)


def refused(directory: Path) -> None:
    args = TrainingArguments(output_dir=str(directory), report_to=[])
    args.fp16 = True
    with pytest.raises(ConfigError, match="loss scale"):
        FireflyerCallback(directory / "c").on_train_begin(args, None, None)


def of_others(directory: Path) -> None:
    CheckpointManager(directory).save(1, {"x": 1}).wait()
    with pytest.raises(
        CheckpointError, match=r"transformers cannot load .* by a CheckpointManager"
    ):
        FireflyerCallback(directory).newest()


def example() -> None:
    for steps in (9, 9):  # the second time there is nothing left to train
        names = run_example("Hugging Face Trainer", {"model": Model(), "dataset": Data()})
        assert names["trainer"].state.global_step == steps
        assert names["checkpoints"].manager.latest() == steps


def main(directory: Path) -> None:
    warnings.simplefilter("ignore")
    assert FireflyerCallback(directory / "none").newest() is None
    interrupted(directory / "middle", every=4, stop_at=9, resumes_at=8)
    # The Trainer's first mean loss after a resume is that since the resume: log where saves are.
    evaluated = {"eval_strategy": "steps", "eval_steps": 4, "logging_steps": 2}
    interrupted(directory / "evaluated", every=4, stop_at=9, resumes_at=8, **evaluated)
    interrupted(directory / "end", every=6, stop_at=9, resumes_at=6, eval_strategy="epoch")
    few = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 5}
    interrupted(directory / "few", every=2, stop_at=5, resumes_at=4, **few)
    suspended(directory / "suspended")
    in_memory(directory / "memory")
    refused(directory / "refused")
    of_others(directory / "others")
    example()
    print("transformers: ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
