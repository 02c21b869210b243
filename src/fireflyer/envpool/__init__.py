"""Environments for reinforcement learning, stepped in batches (docs/envpool.md).

from fireflyer import envpool

envs = envpool.make("CartPole-v1", num_envs=64, num_threads=2, seed=1)
"""

from fireflyer.envpool.making import make

__all__ = ["make"]
