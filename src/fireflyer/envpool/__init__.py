"""Environments for reinforcement learning, stepped in batches (docs/guide/envpool.md).

from fireflyer import envpool

envs = envpool.make("CartPole-v1", num_envs=64, num_threads=2, seed=1)
"""

from typing import TYPE_CHECKING

from fireflyer.envpool.making import make

if TYPE_CHECKING:
    from fireflyer.envpool.processes import ProcessPool

__all__ = ["ProcessPool", "make"]


def __getattr__(name: str) -> object:  # imports gymnasium on first use
    if name == "ProcessPool":
        from fireflyer.envpool.processes import ProcessPool

        return ProcessPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
