"""Pools of environments that a few threads step."""

from typing import Annotated

import numpy
from numpy.typing import NDArray


class Pool:
    """Environments of one task. Only one thread at a time may use a pool."""

    def send(self, ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], actions: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Queues a step of each environment; a reset if `actions` is empty."""

    def receive(self, ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], observations: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], rewards: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')], terminated: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu')], truncated: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """
        Waits for as many stepped environments as the arrays hold, and fills the arrays.
        """

    def seed(self, seed: int) -> None:
        """Restarts all streams of random numbers from a seed."""

    def states(self, out: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """Copies the state of each environment."""

    def set_states(self, states: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None:
        """Begins an episode of each environment in the given state."""

    @property
    def state(self) -> int:
        """Number of doubles of a state."""

    @property
    def observation(self) -> int:
        """Number of floats of an observation."""

def make(task: str, environments: int, threads: int, seed: int) -> Pool:
    """Makes a pool of environments of one task."""
