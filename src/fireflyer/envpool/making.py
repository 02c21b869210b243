"""Makes environments by name."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from fireflyer.errors import ConfigError

if TYPE_CHECKING:
    from fireflyer.envpool.pool import Pool

NATIVE = ("CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1")


def make(
    task: str, env_type: str = "gymnasium", num_envs: int = 1, batch_size: int | None = None,
    num_threads: int = 1, seed: int = 0,
) -> "Pool":  # fmt: skip
    """Makes a pool of environments of one task.

    Args:
        task: a name of gymnasium's registry, one of `NATIVE`.
        env_type: the interface; "gymnasium" is the only one.
        num_envs: environments of the pool.
        batch_size: environments that `recv` returns, the first that are ready; default: all.
        num_threads: threads that step environments, the one that waits in `recv` among them.
        seed: of all random numbers. Trajectories do not depend on `num_threads`.

    Raises:
        ConfigError: an argument is out of range, or there is no such task.
        ModuleNotFoundError: gymnasium is missing.
    """
    if find_spec("gymnasium") is None:
        message = "fireflyer.envpool needs gymnasium: pip install 'fireflyer[envpool]'"
        raise ModuleNotFoundError(message, name="gymnasium")
    if env_type != "gymnasium":
        raise ConfigError(f"invalid env_type {env_type!r}: expected 'gymnasium'")
    if num_envs < 1 or num_threads < 1:
        raise ConfigError(
            f"invalid num_envs {num_envs} or num_threads {num_threads}: expected at least 1"
        )
    batch = num_envs if batch_size is None else batch_size
    if not 1 <= batch <= num_envs:
        raise ConfigError(f"invalid batch_size {batch_size}: expected 1 to num_envs ({num_envs})")
    if task not in NATIVE:
        raise ConfigError(f"invalid task {task!r}: expected one of {', '.join(NATIVE)}")
    from fireflyer.envpool.pool import Pool

    return Pool(task, num_envs, batch, num_threads, seed)
