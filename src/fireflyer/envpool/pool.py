"""Pool of native environments with the interface of gymnasium's vector environments.

EnvPool (arXiv 2206.10558) is the model: `step` takes and returns all environments; with a smaller
`batch_size`, `send` and `recv` let fast environments continue while slow ones are stepped.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from fireflyer._native import envpool as native

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int32]
Batch = tuple[Floats, Doubles, Bools, Bools, dict[str, Any]]


class Pool(VectorEnv[Floats, Any, Any]):
    """Environments of one task, stepped together.

    A step after the end of an episode begins the next episode, as gymnasium's NEXT_STEP does: its
    action is not used, and its reward is 0. The caller owns returned arrays. Only one thread at a
    time may use a pool; a forked child must not use it.

    Args:
        task: name in gymnasium's registry.
        num_envs: number of environments.
        batch_size: number of environments that `recv` returns.
        num_threads: number of threads that step environments, including the caller of `recv`.
        seed: seed of all random numbers.
    """

    def __init__(
        self, task: str, num_envs: int, batch_size: int, num_threads: int, seed: int
    ) -> None:
        one = gymnasium.make(task)
        self.spec = one.spec
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self.batch_size = num_envs, batch_size
        self.single_observation_space = one.observation_space
        self.single_action_space = one.action_space
        self.observation_space = batch_space(one.observation_space, num_envs)
        self.action_space = batch_space(one.action_space, num_envs)
        self._native = native.make(task, num_envs, num_threads, int(seed) & (2**64 - 1))
        self._width = self._native.observation
        self._every = np.arange(num_envs, dtype=np.int32)
        self._pending = 0

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        """Begins an episode in every environment, after all pending steps have ended.

        Args:
            seed: new seed of all random numbers; default: the generators continue.
            options: must be empty.

        Returns:
            Observations (num_envs, ...) float32, and an empty dictionary.

        Raises:
            ValueError: an option or a list of seeds is given.
        """
        if options or not (seed is None or isinstance(seed, int | np.integer)):
            raise ValueError("reset takes one seed for all environments, and no options")
        if self._pending:
            self._receive(self._pending)
        if seed is not None:
            self._native.seed(int(seed) & (2**64 - 1))
        self.async_reset()
        return self._receive(self.num_envs)[1], {}

    def step(self, actions: ArrayLike) -> Batch:
        """Steps every environment.

        Args:
            actions: (num_envs,) numbers of discrete actions, or (num_envs, 1) real values.

        Returns:
            Observations (num_envs, ...) float32, rewards (num_envs,) float64, terminated and
            truncated (num_envs,) bool, and an empty dictionary.

        Raises:
            ValueError: an action is invalid, or steps are pending.
        """
        self.send(actions)
        _, seen, rewards, terminated, truncated = self._receive(self.num_envs)
        return seen, rewards, terminated, truncated, {}

    def async_reset(self) -> None:
        """Begins an episode in every environment; `recv` returns the first observations.

        Raises:
            ValueError: steps are pending.
        """
        self._native.send(self._every, np.empty(0))
        self._pending += self.num_envs

    def send(self, actions: ArrayLike, env_id: ArrayLike | None = None) -> None:
        """Begins a step of some environments.

        Args:
            actions: an action for each environment.
            env_id: (n,) numbers of the environments; default: all.

        Raises:
            ValueError: an action is invalid; an environment does not exist or has a pending step.
                Then no environment begins a step.
        """
        ids = self._every if env_id is None else self._numbers(env_id)
        self._native.send(ids, np.ascontiguousarray(actions, np.float64).reshape(-1))
        self._pending += len(ids)

    def _numbers(self, env_id: ArrayLike) -> Ints:
        given = np.asarray(env_id)
        if given.ndim != 1 or given.dtype.kind not in "iu" or (given.size and (
            given.min() < 0 or given.max() >= self.num_envs
        )):  # fmt: skip
            raise ValueError(f"env_id must be a row of numbers from 0 to {self.num_envs - 1}")
        return np.ascontiguousarray(given, np.int32)

    def recv(self) -> Batch:
        """Waits for the first `batch_size` environments that are ready.

        Returns:
            The values of `step` in `batch_size` rows; the dictionary's `env_id` (batch_size,) int32
            has the environment of each row.

        Raises:
            ValueError: fewer than `batch_size` environments have pending steps.
        """
        ids, seen, rewards, terminated, truncated = self._receive(self.batch_size)
        return seen, rewards, terminated, truncated, {"env_id": ids}

    def states(self) -> Doubles:
        """Returns the physical state of each environment, (num_envs, n).

        Raises:
            ValueError: steps are pending.
        """
        found = np.empty((self.num_envs, self._native.state))
        self._native.states(found)
        return found

    def set_states(self, states: ArrayLike) -> None:
        """Begins an episode of each environment in a given state, in the form of `states`.

        Raises:
            ValueError: steps are pending, a state is not finite, or the shape is wrong.
        """
        given = np.ascontiguousarray(states, np.float64)
        if not np.isfinite(given).all():
            raise ValueError("a state is not finite")
        self._native.set_states(given)

    def _receive(self, count: int) -> tuple[Ints, Floats, Doubles, Bools, Bools]:
        ids = np.empty(count, np.int32)
        seen = np.empty((count, self._width), np.float32)
        rewards = np.empty(count)
        terminated, truncated = np.empty(count, np.bool_), np.empty(count, np.bool_)
        self._native.receive(ids, seen, rewards, terminated, truncated)
        self._pending -= count
        return ids, seen, rewards, terminated, truncated
