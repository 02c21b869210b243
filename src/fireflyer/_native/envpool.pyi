"""Pools of environments that a few threads step."""

from typing import Annotated

import numpy
from numpy.typing import NDArray


class Pool:
    """Environments of one task. One thread at a time."""

    def send(self, ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], actions: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Queues a step of each environment, or a reset where there are no actions.
        """

    def receive(self, ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], observations: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], rewards: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')], terminated: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu')], truncated: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """Fills the arrays with the first environments that have been stepped."""

    def seed(self, seed: int) -> None:
        """Draws all random numbers anew."""

    def states(self, out: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """Copies the state of each environment."""

    def set_states(self, states: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None:
        """Begins an episode of each environment in a state."""

    @property
    def state(self) -> int:
        """Doubles of a state."""

    @property
    def observation(self) -> int:
        """Floats of an observation."""

def make(task: str, environments: int, threads: int, seed: int) -> Pool:
    """A pool of the environments of a task."""
