"""Measures steps of our environments and of the peers' environments, interleaved in one process."""

import contextlib
import functools
import importlib.util
import time
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from fireflyer import envpool as ours
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.interleaving import interleaved
from fireflyer.bench.harness.report import Row

TURN_S = 0.2
"""Approximate time in seconds for each candidate in a round."""

MOST_PROCESSES = 64
MOST_GAMES = 64

Make = Callable[[], Any]


class Stepped:
    """Vector environment that is stepped repeatedly with the same actions."""

    def __init__(self, envs: Any, count: int) -> None:
        self._envs, self._count = envs, count
        envs.reset()
        self._actions = np.asarray(envs.action_space.sample())
        if self._actions.shape[:1] != (count,):  # PyPI's envpool gives the space of one environment
            self._actions = np.stack([self._actions] * count)
        self._turns = 1
        while self.seconds() * self._turns * count < TURN_S / 2:
            self._turns *= 2

    def seconds(self) -> float:
        """Returns the seconds per step and environment."""
        begin = time.perf_counter()
        for _ in range(self._turns):
            self._envs.step(self._actions)
        return (time.perf_counter() - begin) / (self._turns * self._count)


def _one(task: str) -> "gymnasium.Env[Any, Any]":
    """Makes an environment of gymnasium. A game's frames are preprocessed as in ale-py's vector
    environment."""
    if not task.startswith("ALE/"):
        return gymnasium.make(task)
    import ale_py

    gymnasium.register_envs(ale_py)
    game = gymnasium.make(task, frameskip=1, repeat_action_probability=0.0)
    prepared = gymnasium.wrappers.AtariPreprocessing(game, noop_max=30, frame_skip=4)
    return gymnasium.wrappers.FrameStackObservation(prepared, 4)


def _pypi_envpool(task: str, count: int, threads: int) -> Any:
    import envpool

    name = task.removeprefix("ALE/")
    return envpool.make(name, env_type="gymnasium", num_envs=count, num_threads=threads)


def _makers(task: str, count: int, threads: int) -> dict[str, Make]:
    makers: dict[str, Make] = {
        "ours": lambda: ours.make(task, num_envs=count, num_threads=threads),
    }
    one = functools.partial(_one, task)
    if gymnasiums := not task.startswith("ALE/") or importlib.util.find_spec("cv2") is not None:
        makers["SyncVectorEnv"] = lambda: SyncVectorEnv([one] * count)
    if importlib.util.find_spec("envpool") and importlib.util.find_spec("envpool_assets"):
        makers["PyPI envpool"] = lambda: _pypi_envpool(task, count, threads)
    if gymnasiums and count <= MOST_PROCESSES:
        makers["AsyncVectorEnv"] = lambda: AsyncVectorEnv([one] * count)
        makers["processes"] = lambda: ours.ProcessPool([one] * count, threads)
    if task.startswith("ALE/"):
        from ale_py.vector_env import AtariVectorEnv

        rom = task.removeprefix("ALE/").removesuffix("-v5").lower()
        makers["ale-py"] = lambda: AtariVectorEnv(rom, count, num_threads=threads)
    return makers


def _case(task: str, count: int, threads: int, rounds: int) -> list[Row]:
    with contextlib.ExitStack() as stack:
        stepped = {}
        for name, make in _makers(task, count, threads).items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the precision of PyPI envpool's spaces
                envs = make()
                stack.callback(envs.close)
                stepped[name] = Stepped(envs, count)
        found = interleaved({name: one.seconds for name, one in stepped.items()}, rounds)
    rows = []
    title = f"{task}, {count} environments"
    for peer in ("PyPI envpool", "ale-py", "SyncVectorEnv", "AsyncVectorEnv"):
        if peer in found and "ours" in found:
            goal = goals.ENVS.get((task.startswith("ALE/"), peer), (None, None))
            rows.append(Row.of_times(title, "s/step", found["ours"], peer, found[peer], (), *goal))
    if "processes" in found:
        rows.append(Row.of_times(
            f"{title}, in {threads} processes", "s/step", found["processes"], "AsyncVectorEnv",
            found["AsyncVectorEnv"],
        ))  # fmt: skip
    return rows


def run(tasks: tuple[str, ...], counts: tuple[int, ...], threads: int, rounds: int) -> list[Row]:
    """Measures each task with each number of environments."""
    return [
        row
        for task in tasks
        for count in counts
        if count <= MOST_GAMES or not task.startswith("ALE/")
        for row in _case(task, count, threads, rounds)
    ]
