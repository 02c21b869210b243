"""Any environment of gymnasium, in processes that share memory with the caller.

A worker process steps its share of the environments one after the other. Actions and results are in
shared memory; a byte in each direction signals the begin and the end of a step. An environment that
raises, hangs or ends its process is reported and replaced; other environments are not affected.
"""

import contextlib
import itertools
import multiprocessing
import select
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from fireflyer.envpool.sharing import Layout, Shared
from fireflyer.envpool.worker import RESET, STEP, serve
from fireflyer.errors import ConfigError

STARTING_S = 60.0
"""Minimum timeout, in seconds, of a worker's start with its environments. If the pool's deadline is
longer, the deadline is the timeout.
"""

Bools = NDArray[np.bool_]
Maker = Callable[[], "gymnasium.Env[Any, Any]"]


class ProcessPool(VectorEnv[Any, Any, Any]):
    """Environments in worker processes, stepped together.

    A step after the end of an episode begins the next episode (NEXT_STEP). If an environment fails,
    its episode is truncated with reward 0, and `info["error"]` has the reason. If a worker process
    dies or hangs, all its environments are replaced, and the error names the environment that the
    worker was stepping.

    Args:
        makers: a callable for each environment. Workers import these, so each must be a function of
            a module or a `functools.partial` of such a function.
        num_workers: number of worker processes.
        deadline_s: timeout of a step or reset of all environments.
        seed: base seed; environment i is first reset with seed + i.

    Raises:
        ConfigError: an argument is out of range; an environment has other spaces than the first; or
            a space is neither Box, Discrete, MultiDiscrete nor MultiBinary.
    """

    def __init__(
        self, makers: Sequence[Maker], num_workers: int = 1, deadline_s: float = 60.0, seed: int = 0
    ) -> None:
        if not makers or num_workers < 1 or not deadline_s > 0:
            raise ConfigError("a pool needs environments, workers and a deadline above 0")
        one = makers[0]()
        spaces = one.observation_space, one.action_space
        for space in spaces:
            if not isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
                raise ConfigError(f"invalid space {space}: expected one array of numbers")
        self.spec, self.num_envs = one.spec, len(makers)
        one.close()
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = spaces
        self.observation_space = batch_space(spaces[0], self.num_envs)
        self.action_space = batch_space(spaces[1], self.num_envs)
        for number, maker in enumerate(makers[1:], 1):
            if maker != makers[0]:
                _compare(maker(), spaces, number)
        self._makers, self._deadline_s = list(makers), deadline_s
        self._seed: int | None = seed
        self._shared = Shared.create(Layout.of(*spaces, self.num_envs))
        count = min(num_workers, self.num_envs)
        edges = [self.num_envs * n // count for n in range(count + 1)]
        self._shares = [range(a, b) for a, b in itertools.pairwise(edges)]
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[SpawnProcess, Connection]] = []
        self._end = weakref.finalize(self, _end, self._workers, self._shared)  # also runs at exit
        try:
            for share in self._shares:
                self._workers.append(self._start(share))
            failed: dict[int, dict[str, Any]] = {}
            self._wait_for_workers(range(count), failed, max(STARTING_S, deadline_s))
            if failed:
                number = min(failed)
                raise ConfigError(f"environment {number} cannot be made: {failed[number]['error']}")
        except BaseException:
            self.close()
            raise

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode in every environment.

        Args:
            seed: base seed; environment i is reset with seed + i. Default: the pool's seed at the
                first reset, later none.
            options: must be empty.

        Raises:
            ValueError: an option or a list of seeds is given.
        """
        if options or not (seed is None or isinstance(seed, int | np.integer)):
            raise ValueError("reset takes one seed for all environments, and no options")
        if seed is None and self._seed is not None:
            seed = self._seed
        self._seed = None
        self._check_open()
        self._shared.seeds[:] = -1 if seed is None else seed + np.arange(self.num_envs)
        info = self._round(RESET)
        return self._shared.observations.copy(), info

    def step(self, actions: ArrayLike) -> tuple[Any, Any, Bools, Bools, dict[str, Any]]:
        """Steps every environment.

        Returns:
            Observations, rewards (num_envs,) float64, terminated and truncated (num_envs,) bool, and
            `info` by gymnasium's rules; its `error` (num_envs,) has the reasons of replacements.

        Raises:
            ValueError: the actions have a wrong shape, or an action is outside its space. Then no
                environment was stepped.
        """
        self._check_open()
        given = np.asarray(actions)
        shared = self._shared
        if given.shape != shared.actions.shape:
            raise ValueError(f"actions have shape {given.shape}, expected {shared.actions.shape}")
        if not self._in_space(given):
            raise ValueError(f"an action lies outside {self.single_action_space}")
        shared.actions[:] = given
        info = self._round(STEP)
        return (
            shared.observations.copy(), shared.rewards.copy(), shared.terminated.copy(),
            shared.truncated.copy(), info,
        )  # fmt: skip

    def _in_space(self, actions: NDArray[Any]) -> bool:
        """Returns True if the space contains each action; discrete spaces need whole numbers."""
        dtype = self._shared.actions.dtype
        if actions.dtype.kind not in "biuf" or (dtype.kind != "f" and not np.all(actions % 1 == 0)):
            return False
        space = self.action_space
        low, high = (space.low, space.high) if isinstance(space, Box) else (0, 1)
        if isinstance(space, MultiDiscrete):
            low, high = space.start, space.start + space.nvec - 1
        return bool(np.all((actions >= low) & (actions <= high)))

    def close_extras(self, **kwargs: Any) -> None:
        """Ends the workers and frees the shared memory."""
        self._end()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("this pool was closed")

    def _start(self, share: range) -> tuple[SpawnProcess, Connection]:
        ours, theirs = self._context.Pipe()
        makers = [self._makers[n] for n in share]
        process = self._context.Process(
            target=serve, args=(theirs, makers, share.start, self._shared.name, self._shared.layout),
            daemon=True,
        )  # fmt: skip
        process.start()
        theirs.close()
        return process, ours

    def _round(self, what: int) -> dict[str, Any]:
        infos: dict[int, dict[str, Any]] = {}
        for _, pipe in self._workers:
            with contextlib.suppress(OSError):  # `_wait_for_workers` replaces a dead worker
                pipe.send_bytes(bytes([what]))
        self._wait_for_workers(range(len(self._workers)), infos, self._deadline_s)
        whole: dict[str, Any] = {}
        for number in sorted(infos):
            whole = self._add_info(whole, infos[number], number)
        return whole

    def _wait_for_workers(
        self, numbers: Sequence[int], infos: dict[int, dict[str, Any]], limit_s: float
    ) -> None:
        """Waits until each worker has answered; replaces workers that time out or die."""
        end = time.monotonic() + limit_s
        waiting = set(numbers)
        while waiting:
            pipes = {self._workers[number][1].fileno(): number for number in waiting}
            ready = select.select(list(pipes), [], [], max(0.0, end - time.monotonic()))[0]
            if not ready:
                for number in sorted(waiting):
                    self._replace(number, f"it took over {limit_s:g} s", infos)
                return
            for number in (pipes[fd] for fd in ready):
                try:
                    infos.update(self._workers[number][1].recv())
                except (EOFError, OSError):
                    self._workers[number][0].join(1.0)
                    code = self._workers[number][0].exitcode
                    self._replace(number, f"its process ended with {code}", infos)
                waiting.discard(number)

    def _replace(self, number: int, why: str, infos: dict[int, dict[str, Any]]) -> None:
        """Restarts a worker; the episodes of its environments end."""
        process, pipe = self._workers[number]
        process.kill()
        process.join()
        pipe.close()
        share, shared = self._shares[number], self._shared
        at = int(shared.stepping[share.start])
        self._workers[number] = self._start(share)
        process, pipe = self._workers[number]
        with contextlib.suppress(EOFError, OSError):
            if pipe.poll(max(STARTING_S, self._deadline_s)):
                for env, info in pipe.recv().items():
                    why += f"; environment {env} cannot be made again: {info['error']}"
            else:
                process.kill()  # the next round replaces this worker
        which = slice(share.start, share.stop)
        shared.rewards[which], shared.terminated[which], shared.truncated[which] = 0, False, True
        for env in share:
            text = why if env == at else f"environment {at}, of the same process, failed: {why}"
            infos[env] = {"error": text}


def _end(workers: list[tuple[SpawnProcess, Connection]], shared: Shared) -> None:
    """Ends the workers, each within a second, and frees their memory."""
    for process, pipe in workers:
        pipe.close()
        process.join(1.0)
        process.kill()
        process.join()
    workers.clear()
    shared.close()


def _compare(env: "gymnasium.Env[Any, Any]", spaces: tuple[Any, Any], number: int) -> None:
    """Checks that an environment has the same spaces as the first; raises ConfigError."""
    found = env.observation_space, env.action_space
    env.close()
    if found != spaces:
        raise ConfigError(f"environment {number} has the spaces {found}, the first one {spaces}")
