"""Trainers of Lightning and transformers whose parts take known times: phases are exact.

`python -m tests.haiprof.trainer_runs lightning|transformers` with the Python of build/callbacks.
"""

import sys
import tempfile
from typing import Any

import pytest
import torch
from tests.haiprof.clockwork import Clock, Data, Model, Slow, hooked, in_ms

from fireflyer.haiprof.inside import buffer as buffers
from fireflyer.haiprof.inside.callbacks import callback_methods
from fireflyer.haiprof.phases import Row

STEPS = 6
EXPECTED = {"data": 6, "forward": 21, "backward": 40, "optimizer": 7}


def lightning(clock: Clock) -> tuple[list[Row], dict[str, float]]:
    """Trains two epochs; returns rows and the expected callbacks in seconds."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import CSVLogger

    class Task(LightningModule):  # type: ignore[misc]  # untyped here
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(clock)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch).sum()
            clock.work(1)
            self.log("loss", loss)
            return loss

        def on_train_batch_start(self, *_: Any) -> None:
            clock.work(2)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Slow(self.model, clock, 7)

    class Reports(Callback):  # type: ignore[misc]  # untyped here
        def on_train_batch_end(self, *_: Any) -> None:
            clock.work(5)

    class Log(CSVLogger):  # type: ignore[misc]  # untyped here
        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            clock.work(1)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=2, callbacks=[Reports()], logger=Log(folder),
            log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False,
        )  # fmt: skip
        connector = trainer._logger_connector
        update = connector.update_train_step_metrics

        def slow_update() -> None:
            clock.work(3)
            update()

        connector.update_train_step_metrics = slow_update
        with hooked() as hooks:
            trainer.fit(Task(), torch.utils.data.DataLoader(Data(clock, 3, 2 * STEPS), 2))
            rows = hooks.rows()
    return rows, {"Task": 0.002, "Reports": 0.005, "Log": 0.001}


def transformers(clock: Clock) -> tuple[list[Row], dict[str, float]]:
    """Trains two epochs; returns rows and the expected callbacks in seconds."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(clock)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            loss = self.model(x).sum()
            clock.work(1)
            return {"loss": loss}

    class Task(Trainer):  # type: ignore[misc]  # untyped here
        def log(self, *args: Any, **kwargs: Any) -> None:
            clock.work(3)
            super().log(*args, **kwargs)

    class Reports(TrainerCallback):  # type: ignore[misc]  # untyped here
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.work(2)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.work(5)

        def on_log(self, *_: Any, **__: Any) -> None:
            clock.work(1)

    class Named(Data):
        def __getitem__(self, index: int) -> Any:
            return {"x": super().__getitem__(index)}

    model = Loss()
    optimizer = Slow(model, clock, 7)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with tempfile.TemporaryDirectory() as folder, hooked() as hooks:
        asked = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=2, num_train_epochs=2, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        trainer = Task(
            model, asked, train_dataset=Named(clock, 3, 2 * STEPS), callbacks=[Reports()],
            optimizers=(optimizer, schedule),
        )  # fmt: skip
        trainer.train()
        rows = hooks.rows()
    return rows, {"Reports": 0.008}


def main(name: str) -> None:
    clock = Clock()
    buffers.CLOCK = clock
    before = {place: vars(place[0])[place[1]] for place in callback_methods()}
    rows, callbacks = {"lightning": lightning, "transformers": transformers}[name](clock)
    assert len(rows) == 2 * STEPS - 1, len(rows)
    for row in rows:
        spent = {**EXPECTED, "callbacks": round(1e3 * sum(callbacks.values())), "framework": 3}
        found = in_ms(row)
        if row.step == STEPS - 1 or name == "transformers":
            found["data"] = EXPECTED["data"]  # loaders are made, or are one batch ahead
        assert found == spent, (row, spent)
        assert row.callbacks == pytest.approx(callbacks), row.callbacks
    assert before.items() <= {p: vars(p[0])[p[1]] for p in callback_methods()}.items()
    print(f"{name}: ok")


if __name__ == "__main__":
    main(sys.argv[1])
