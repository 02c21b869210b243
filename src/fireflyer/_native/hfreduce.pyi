"""
The collective engine: shared memory inside a host, a TCP ring between hosts.
"""

from collections.abc import Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray


class Watch:
    """
    Sees the death of any rank and tells everybody; one a group, with a thread.
    """

    def __init__(self, *, rank: int, world: int) -> None: ...

    def add_process(self, rank: int, pidfd: int) -> None:
        """Watches a process of this host; owns the descriptor."""

    def add_link(self, rank: int, socket: int) -> None:
        """Adds a duplex control link; owns the socket."""

    def attach(self, group: Group) -> None:
        """Fails `group` with the first failure."""

    def announce(self, message: str, rank: int = -1) -> None:
        """
        Gives the group up on all ranks: because of `rank`, or for a reason of no single rank.
        """

    def leave(self, operations: int, seconds: float = 1.0) -> None:
        """Says goodbye; waits at most `seconds` until the neighbours know."""

    def drop_links(self) -> None:
        """Ends without a goodbye, as a death does."""

    def wait(self, seconds: float = -1.0) -> bool:
        """
        True once there is a failure, False when `seconds` passed before (< 0: no limit).
        """

    def rethrow(self) -> None:
        """Raises the first failure, if any."""

    def failed_ranks(self) -> set[int]:
        """Ranks known to be dead."""

    def left_ranks(self) -> set[int]:
        """Ranks that said goodbye."""

def guard_descriptor(fd: int) -> None:
    """
    Replaces the descriptor by one of /dev/null in every forked child, from now on.
    """

def unguard_descriptor(fd: int) -> None:
    """
    Ends the guard; required before the descriptor is closed or given away.
    """

class DType(enum.Enum):
    FLOAT32 = 1

    FLOAT64 = 2

    BFLOAT16 = 3

class ReduceOp(enum.Enum):
    SUM = 1

    AVG = 2

class Operation:
    """A submitted call; completed once."""

    def wait(self, seconds: float = -1.0) -> bool:
        """
        True when it is over, False when `seconds` passed before (< 0: no limit).
        """

    def done(self) -> bool: ...

    def rethrow(self) -> None:
        """Raises the error of a finished operation, if any."""

class RingEnds:
    """Connected sockets to both neighbours; owned by the group."""

    def __init__(self, next_socket: int, next_rank: int, previous_socket: int, previous_rank: int, index: int) -> None: ...

class Group:
    """A process group of the engine."""

    def __init__(self, *, rank: int, world: int, timeout_s: float, spin: bool, control: int, members: Sequence[Sequence[int]], me: int, hosts: int, lanes: int, ring: RingEnds | None) -> None:
        """
        members: (rank, Unix socket, pidfd) of this host in team order, -1 where there is none; control: descriptor of the control segment, -1 for a rank alone on its host.
        """

    def allreduce(self, data: int, count: int, dtype: DType, op: ReduceOp, run_here: bool) -> Operation:
        """
        Reduces `count` elements at address `data` in place; they must stay alive until it is done.
        """

    def abort(self) -> None: ...

    def set_timeout(self, seconds: float) -> None: ...

    @property
    def network_bytes_sent(self) -> int:
        """Bytes this rank has sent to other hosts."""

def control_bytes(members: int) -> int: ...

def create_segment(name: str, bytes: int) -> int:
    """
    Descriptor of a new zeroed and reserved shared segment; the caller closes it.
    """

def arena_block(bytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
    """Zero-copy memory as a uint8 array; given back when the array dies."""

def arena_reserved_bytes() -> int:
    """Shared memory that this process holds for zero-copy tensors."""

def in_arena(data: int, bytes: int) -> bool:
    """Do these bytes lie in zero-copy memory?"""
