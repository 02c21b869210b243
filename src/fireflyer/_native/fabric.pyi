"""The network: max-min fair flows over time."""

from typing import Annotated

import numpy
from numpy.typing import NDArray


class Flows:
    """
    Flows over links with max-min fair rates. Only one thread at a time may use it.
    """

    def __init__(self, capacities: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], begin: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], links: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], bytes: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Flow i uses links[begin[i]:begin[i + 1]] and carries bytes[i]; capacities are bytes a second.
        """

    def run(self, until: float, merge: float) -> None:
        """
        Runs to the time `until`, in seconds. If a flow ends at time t, all flows that end by t * (1 + merge) end in the same event.
        """

    def rates(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """Bytes a second of each flow."""

    def ends(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """Time at which each flow ended, in seconds; infinity if it has not."""

    def left(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """Bytes that each flow still carries."""

    @property
    def now(self) -> float: ...

    @property
    def events(self) -> int:
        """Number of times that rates were computed."""
