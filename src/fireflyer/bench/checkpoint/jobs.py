"""Stand-ins for training jobs in the checkpoint benchmark. They show by how much saves slow a job
that keeps computing."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fireflyer.bench.checkpoint.state import State, flat
from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CheckpointError

STEP_S = 0.5
_WIDTH, _PRODUCTS = 768, 4


class Overlapped:
    """Job whose forward and backward only read the state; uses the overlapped mode for saves.

    Before a step, every value of tensor i is i + step, so the values of a loaded state tell its
    step.
    """

    def __init__(self, folder: Path, state: State) -> None:
        manager: Any = CheckpointManager
        self._manager = manager(folder, overlap=True, keep=1)
        self._tensors = [tensor for _, tensor in flat(state)]
        self._state = state
        self._step = 0
        for number, tensor in enumerate(self._tensors):
            tensor.fill_(number)

    def step(self) -> float:
        """Runs a save, a step and the optimizer; returns the seconds for which the save blocked
        them.

        Raises:
            CheckpointError: the saved state is not the state of that step.
        """
        began = time.perf_counter()
        handle = self._manager.save(self._step, self._state)
        blocked = time.perf_counter() - began
        time.sleep(STEP_S)  # forward and backward on another device
        began = time.perf_counter()
        self._manager.before_step()
        blocked += time.perf_counter() - began
        for tensor in self._tensors:
            tensor.add_(1)
        handle.wait()
        self._check(self._manager.load())
        self._step += 1
        return blocked

    def _check(self, loaded: Any) -> None:
        found = dict(flat(loaded))
        for number, (name, _) in enumerate(flat(self._state)):
            tensor = found.get(name)
            if tensor is None or not bool((tensor == number + self._step).all()):
                raise CheckpointError(
                    f"bench checkpoint: the overlapped save of step {self._step} holds wrong "
                    f"values in {name}"
                )


class Computing:
    """Job that multiplies matrices on all cores."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._weight = torch.rand(_WIDTH, _WIDTH, generator=generator) / _WIDTH
        self._value = torch.rand(_WIDTH, _WIDTH, generator=generator)

    def steps_per_second(self, seconds: float) -> float:
        """Runs steps for `seconds`, at least one, and returns the steps per second."""
        began = time.perf_counter()
        steps = 0
        taken = 0.0
        while taken < seconds:
            for _ in range(_PRODUCTS):
                self._value = self._weight @ self._value
            steps += 1
            taken = time.perf_counter() - began
        return steps / taken


@contextmanager
def all_cores() -> Iterator[None]:
    """Lets torch use one thread per core."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
