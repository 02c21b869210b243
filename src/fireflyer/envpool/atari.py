"""Atari games in ale-py's vector environment, which steps them in native threads.

The preprocessing is the one of EnvPool and of papers since DQN: every fourth frame, the maximum of
the last two frames, grey, 84 x 84, four frames stacked, rewards clipped to -1, 0 and 1, and up to
30 initial idle steps.
"""

import re
from typing import Any

import numpy as np
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Discrete
from numpy.typing import ArrayLike, NDArray

from fireflyer.errors import ConfigError

PREFIX = "ALE/"


def rom_of(task: str) -> str:
    """Returns the name of a game's ROM: "ms_pacman" for "ALE/MsPacman-v5".

    Raises:
        ConfigError: ale-py has no such game.
    """
    name = task.removeprefix(PREFIX).removesuffix("-v5")
    rom = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    if not task.endswith("-v5") or rom not in roms.get_all_rom_ids():
        raise ConfigError(f"invalid task {task!r}: expected a game of ale-py, such as ALE/Pong-v5")
    return rom


class Atari(AtariVectorEnv):
    """Vector environment with the interface of `Pool`.

    Args:
        task: name of the game, for example "ALE/Pong-v5".
        num_envs: number of environments.
        batch_size: number of environments that `recv` returns.
        num_threads: number of threads that step environments.
        seed: seed of the first reset.
        options: further arguments of `ale_py.vector_env.AtariVectorEnv`, such as `img_height` (pixels),
            `episodic_life` or `repeat_action_probability`.

    Raises:
        ConfigError: ale-py has no such game, or no such option.
    """

    def __init__(
        self, task: str, num_envs: int, batch_size: int, num_threads: int, seed: int,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        try:
            super().__init__(
                rom_of(task), num_envs, batch_size=batch_size, num_threads=num_threads, **options
            )
        except TypeError as error:
            raise ConfigError(f"invalid option of {task}: {error}") from None
        self._seed: int | None = seed & 0x3FFFFFFF
        self._begun: tuple[Any, dict[str, Any]] | None = None
        self._last: NDArray[np.int32] = np.arange(batch_size, dtype=np.int32)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode in every environment. See `gymnasium.vector.VectorEnv.reset`."""
        if seed is None and self._seed is not None:
            seed, self._seed = self._seed, None
        return super().reset(seed=seed, options=options)

    def async_reset(self) -> None:
        """Begins an episode in every environment. The next `recv` returns the environments that are
        ready first."""
        self._begun = self.reset()

    def send(self, actions: ArrayLike, env_id: ArrayLike | None = None) -> None:
        """Begins a step of the environments that `recv` returned last.

        Raises:
            ValueError: the number of actions is wrong, an action is invalid, or `env_id` names
                other environments.
        """
        if env_id is not None and not np.array_equal(env_id, self._last):
            raise ValueError("env_id must name the environments that recv returned last, in order")
        given = np.ascontiguousarray(actions)
        space = self.single_action_space
        if isinstance(space, Discrete):
            whole = given.astype(np.int64)
            known = given.shape == (self.batch_size,) and np.all((whole == given) & (whole >= 0))
            if not known or whole.max(initial=0) >= space.n:
                raise ValueError(
                    f"actions must be {self.batch_size} numbers from 0 to {int(space.n) - 1}"
                )
            given = whole
        super().send(given)

    def recv(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Waits for the first `batch_size` environments that are ready; see `Pool.recv`."""
        if self._begun is not None:
            (seen, info), self._begun = self._begun, None
            over = np.zeros(len(seen), bool)
            found = (seen, np.zeros(len(seen), np.int32), over, over.copy(), info)
        else:
            found = super().recv()
        self._last = found[4]["env_id"]
        return found
