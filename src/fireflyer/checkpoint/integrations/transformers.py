"""Hugging Face Trainer integration: a FireflyerCallback saves and resumes a training."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from fireflyer.checkpoint import rng
from fireflyer.checkpoint.control_group import rank_and_world
from fireflyer.checkpoint.integrations.manager_callback import ManagerCallback
from fireflyer.checkpoint.integrations.origin import check_origin
from fireflyer.checkpoint.state.plain_types import numbers, plain
from fireflyer.errors import ConfigError

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ConfigError(
        "fireflyer.checkpoint.integrations.transformers needs the package transformers: "
        "pip install 'transformers>=5' accelerate"
    ) from error


class FireflyerCallback(ManagerCallback, TrainerCallback):  # type: ignore[misc]  # untyped here
    """Saves model, optimizer, scheduler, trainer state and each rank's random number generators.

    A save follows a step, its logging and its evaluation. Training does not wait for the storage.
    The callback supports one process and data parallelism. The last step is always saved. With
    `should_suspend`, training stops once the save is durable. Use this callback instead of the
    Trainer's own saves: `save_strategy="no"`.
    """

    _due = _await_log = _await_evaluation = _await_epoch = False
    _restored: tempfile.TemporaryDirectory[str] | None = None

    def newest(self) -> str | None:
        """Returns the directory for `trainer.train(resume_from_checkpoint=)`, or None.

        The call writes the newest good checkpoint in the Trainer's format into a temporary
        directory of this rank, which is removed after the first step. Collective.
        """
        if self.manager.latest() is None:
            return None
        state = self.manager.load()
        check_origin(state, __name__)
        self._restored = tempfile.TemporaryDirectory(prefix="fireflyer-resume-")
        directory = Path(self._restored.name)
        torch.save(state["model"], directory / "pytorch_model.bin")
        torch.save(state["optimizer"], directory / "optimizer.pt")
        torch.save(state["scheduler"], directory / "scheduler.pt")
        (directory / "trainer_state.json").write_text(state["trainer_state"])
        own = self.manager.loaded_per_rank()
        if own is not None:
            rank, world = rank_and_world()
            name = "rng_state.pth" if world == 1 else f"rng_state_{rank}.pth"
            torch.save(_as_trainer_reads(own, world), directory / name)
        return str(directory)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        sharded = bool(args.fsdp) or args.deepspeed is not None
        if sharded or args.fp16:
            what = (
                "FSDP or DeepSpeed" if sharded else "fp16 (a callback cannot read its loss scale)"
            )
            raise ConfigError(
                f"FireflyerCallback does not save {what}: use data parallelism and bf16"
            )

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        self._forget_restored()
        self._due = self.manager.should_save(state.global_step) or control.should_training_stop
        # After the last step of an epoch, `on_epoch_end` is called and may log and evaluate once
        # more, so the save waits for that call.
        self._await_epoch = state.epoch is not None and float(state.epoch).is_integer()
        self._await_what_follows(control)
        self._save_if_ready(state, control, parts)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        self._await_epoch = False
        self._await_what_follows(control)
        self._save_if_ready(state, control, parts)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        self._await_log = False
        self._save_if_ready(state, control, parts)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        self._await_evaluation = False
        self._save_if_ready(state, control, parts)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._forget_restored()
        self.manager.wait()

    def _await_what_follows(self, control: TrainerControl) -> None:
        """Records whether a log and an evaluation follow in this step.

        A save includes both, and the generators' states after them.
        """
        self._await_log = bool(control.should_log)
        self._await_evaluation = bool(control.should_evaluate)

    def _save_if_ready(
        self, state: TrainerState, control: TrainerControl, parts: dict[str, Any]
    ) -> None:
        if not self._due or self._await_log or self._await_evaluation or self._await_epoch:
            return
        self._due = False
        content = {
            "model": plain(parts["model"].state_dict()),
            "optimizer": plain(parts["optimizer"].state_dict()),
            "scheduler": plain(parts["lr_scheduler"].state_dict()),
            "trainer_state": json.dumps(dataclasses.asdict(state)),
        }
        metrics = numbers({name: value for log in state.log_history for name, value in log.items()})
        handle = self.manager.save(
            state.global_step, content, per_rank=rng.capture(), metrics=metrics
        )
        self._leave_if_asked(handle, lambda: setattr(control, "should_training_stop", True))

    def _forget_restored(self) -> None:
        """Removes the restored files; the Trainer has read them by the end of the first step."""
        if self._restored is not None:
            self._restored.cleanup()
            self._restored = None


def _as_trainer_reads(own: dict[str, Any], world: int) -> dict[str, Any]:
    python, legacy = rng.as_tuples(own)
    state = {"python": python, "numpy": legacy, "cpu": own["torch"]}
    if "cuda" in own:
        state["cuda"] = own["cuda"] if world == 1 else _of_all_devices(own["cuda"])
    return state


def _of_all_devices(state: torch.Tensor) -> list[torch.Tensor]:
    """Returns states for all visible devices, because the Trainer sets all; this rank uses one."""
    states = torch.cuda.get_rng_state_all()
    states[torch.cuda.current_device()] = state
    return states
