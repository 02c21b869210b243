"""Function that makes environments by name."""

import functools
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from fireflyer.errors import ConfigError

if TYPE_CHECKING:
    from fireflyer.envpool.atari import Atari
    from fireflyer.envpool.pool import Pool
    from fireflyer.envpool.processes import ProcessPool

MOST_ENVS = 1 << 20
MOST_THREADS = 1024

NATIVE = ("CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1")


def make(
    task: str, env_type: str = "gymnasium", num_envs: int = 1, batch_size: int | None = None,
    num_threads: int = 1, seed: int = 0, **options: Any,
) -> "Pool | Atari | ProcessPool":  # fmt: skip
    """Makes a pool of environments of one task.

    Tasks of `NATIVE` run in native code of this package, and Atari games ("ALE/Pong-v5") in ale-py.
    Every other task of gymnasium's registry runs in `num_threads` processes.

    Args:
        task: name in gymnasium's registry, or a game of ale-py.
        env_type: interface of the pool; only "gymnasium" is supported.
        num_envs: number of environments in the pool.
        batch_size: number of environments that `recv` returns, the first that are ready; default:
            all.
        num_threads: number of threads that step environments, including the thread that waits in
            `recv`; for tasks that run in processes, the number of processes.
        seed: seed of all random numbers. Trajectories do not depend on `num_threads`.
        options: options of the task: of `ale_py.vector_env.AtariVectorEnv`, or of `gymnasium.make`.

    Raises:
        ConfigError: an argument is out of range, or there is no such task.
        ModuleNotFoundError: gymnasium, or ale-py for Atari, is missing.
    """
    for package in ("gymnasium", "ale_py") if task.startswith("ALE/") else ("gymnasium",):
        if find_spec(package) is None:
            message = f"{task} needs {package}: pip install 'fireflyer[envpool]'"
            raise ModuleNotFoundError(message, name=package)
    if env_type != "gymnasium":
        raise ConfigError(f"invalid env_type {env_type!r}: expected 'gymnasium'")
    for name, value, most in (
        ("num_envs", num_envs, MOST_ENVS), ("num_threads", num_threads, MOST_THREADS),
        ("batch_size", num_envs if batch_size is None else batch_size, MOST_ENVS),
    ):  # fmt: skip
        if (
            isinstance(value, bool)
            or not isinstance(value, int | np.integer)
            or not 1 <= value <= most
        ):
            raise ConfigError(f"invalid {name} {value!r}: expected 1 to {most}")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ConfigError(f"invalid seed {seed!r}: expected a whole number")
    batch = num_envs if batch_size is None else batch_size
    if not 1 <= batch <= num_envs:
        raise ConfigError(f"invalid batch_size {batch_size}: expected 1 to num_envs ({num_envs})")
    if task.startswith("ALE/"):
        from fireflyer.envpool.atari import Atari

        return Atari(task, num_envs, batch, num_threads, seed, options)
    if task in NATIVE and not options:
        from fireflyer.envpool.pool import Pool

        return Pool(task, num_envs, batch, num_threads, seed)
    return _in_processes(task, num_envs, batch, num_threads, seed, options)


def _in_processes(
    task: str, num_envs: int, batch: int, num_workers: int, seed: int, options: dict[str, Any]
) -> "ProcessPool":
    import gymnasium

    from fireflyer.envpool.processes import ProcessPool

    if batch != num_envs:
        raise ConfigError(f"{task} runs in processes: batch_size must be num_envs ({num_envs})")
    try:
        maker = functools.partial(gymnasium.make, task, **options)
        return ProcessPool([maker] * num_envs, num_workers, seed=seed)
    except (gymnasium.error.Error, TypeError) as error:
        raise ConfigError(f"invalid task {task!r}: {error}") from None
