"""Environments that fail, for `ProcessPool`."""

import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Counting(gymnasium.Env[Any, Any]):
    """Shows the number of steps since its reset and how its episode's reset was seeded."""

    observation_space = Box(-1, np.inf, (2,), np.int64)
    action_space = Discrete(10)

    def __init__(self, number: int = 0) -> None:
        self._number, self._steps, self._seed = number, 0, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._steps, self._seed = 0, -1 if seed is None else seed
        return np.array([0, self._seed]), {}

    def step(self, action: Any) -> Any:
        """Fails by the action: 1 raises, 2 segfaults, 3 hangs, 4 ends the episode, 5 tells something."""
        self._steps += 1
        if action == 1:
            raise KeyError(f"no step {self._steps} in {self._number}")
        if action == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        if action == 3:
            time.sleep(1000)
        info = {"pid": os.getpid()} if action == 5 else {}
        return np.array([self._steps, self._seed]), float(action), bool(action == 4), False, info


class Allowed(Counting):
    """Can be made while a file is there."""

    def __init__(self, path: str, number: int) -> None:
        if not os.path.exists(path):
            raise OSError("not allowed")
        super().__init__(number)


class Unmakeable(gymnasium.Env[Any, Any]):
    """Cannot be made in a worker."""

    observation_space, action_space = Counting.observation_space, Counting.action_space
    made = 0

    def __init__(self) -> None:
        Unmakeable.made += 1
        if not os.environ.get("FIREFLYER_TEST_MAKEABLE") == str(os.getpid()):
            raise OSError("no display")
