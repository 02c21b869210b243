"""
The collective engine: shared memory inside a host, TCP or UCX between hosts.
"""

from collections.abc import Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray


class Watch:
    """
    Failure detector of a group: detects the death of a rank and notifies all ranks.
    """

    def __init__(self, *, rank: int, world: int) -> None: ...

    def add_process(self, rank: int, pidfd: int) -> None:
        """Watches a process of this host; owns the descriptor."""

    def add_link(self, rank: int, socket: int) -> None:
        """Adds a duplex control link; owns the socket."""

    def attach(self, group: Group, post: P2PEngine) -> None:
        """
        Fails the group and `post` with the first failure, and announces failures that the group detects.
        """

    def announce(self, message: str, rank: int = -1) -> None:
        """
        Breaks the group on all ranks because of `rank`; -1: the reason does not lie with a single rank.
        """

    def withdraw(self, operation: int) -> None:
        """Asks all ranks to cancel the operation of this number."""

    def leave(self, seconds: float = 1.0) -> None:
        """
        Announces that this rank leaves; waits at most `seconds` until the neighbours have received that.
        """

    def drop_links(self) -> None:
        """Closes all links unannounced, as a death does."""

    def wait(self, seconds: float = -1.0) -> bool:
        """
        Waits for a failure; returns False if `seconds` pass first (< 0: no limit).
        """

    def rethrow(self) -> None:
        """Raises the first failure, if any."""

    def failed_ranks(self) -> set[int]:
        """Ranks known to be dead."""

    def left_ranks(self) -> set[int]:
        """Ranks that left in an orderly way."""

def set_thread_cpus(cpus: Sequence[int]) -> None:
    """
    Sets the cores of the threads that groups start from now on; an empty list: all cores of the process.
    """

def guard_descriptor(fd: int) -> None:
    """
    Replaces the descriptor by one of /dev/null in every forked child, from now on.
    """

def unguard_descriptor(fd: int) -> None:
    """
    Ends the guard. Must be called before the descriptor is closed or given away.
    """

class DType(enum.Enum):
    FLOAT32 = 1

    FLOAT64 = 2

    FLOAT16 = 3

    BFLOAT16 = 4

    FLOAT8_E4M3FN = 5

    FLOAT8_E5M2 = 6

    INT64 = 7

    INT32 = 8

    INT16 = 9

    INT8 = 10

    UINT8 = 11

    BOOL = 12

class ReduceOp(enum.Enum):
    SUM = 1

    AVG = 2

    MIN = 3

    MAX = 4

    PRODUCT = 5

    BAND = 6

    BOR = 7

    BXOR = 8

class Codec(enum.Enum):
    NONE = 0

    FP32 = 1

    BF16 = 2

    FP16 = 3

    INT8 = 4

class Kind(enum.Enum):
    ALLREDUCE = 1

    REDUCE_SCATTER = 2

    ALL_GATHER = 3

    BROADCAST = 4

    REDUCE = 5

    GATHER = 6

    SCATTER = 7

    ALL_TO_ALL = 8

    BARRIER = 9

class Transport(enum.Enum):
    """Transport of the bytes of collectives between hosts."""

    TCP = 0

    UCX = 1

class Operation:
    """A submitted call; completed once."""

    def wait(self, seconds: float = -1.0) -> bool:
        """
        Waits until the operation is over; returns False if `seconds` pass first (< 0: no limit).
        """

    def done(self) -> bool: ...

    @property
    def number(self) -> int:
        """Number in the order of submission to the group; equal on all ranks."""

    @property
    def priority(self) -> int: ...

    @property
    def source(self) -> int:
        """The sender's rank, once a receive from any source is over."""

    def shared(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        The block of a shared result as a uint8 array. REQUIRES: the operation is over, without error.
        """

    def rethrow(self) -> None:
        """Raises the error of a finished operation, if any."""

class Group:
    """A process group of the engine."""

    def __init__(self, *, rank: int, world: int, timeout_s: float, spin: bool, control: int, members: Sequence[Sequence[int]], me: int, hosts: Sequence[Sequence[int]], host: int, zones: Sequence[int], transport: Transport = Transport.TCP) -> None:
        """
        members: (rank, Unix socket, pidfd) of this host in team order, -1 where there is none; control: descriptor of the control segment, -1 for a rank alone on its host.
        """

    def submit(self, *, kind: Kind, inputs: Sequence[tuple[int, int]], outputs: Sequence[tuple[int, int]], count: int, dtype: DType, op: ReduceOp = ReduceOp.SUM, root: int = -1, wire: Codec = Codec.NONE, residual: int = 0, seed: int = 0, shared: bool = False, priority: int = 0, label: int = 0, timeout_s: float = 0.0, run_here: bool = False) -> Operation:
        """
        Starts a collective. inputs, outputs: (address, bytes) by rank; this memory must stay alive until the operation is done. timeout_s: timeout of this call; 0: the group's. run_here: if nothing is queued, this thread runs the operation before the call returns.
        """

    def allreduce_now(self, data: int, bytes: int, count: int, dtype: DType, op: ReduceOp) -> Operation:
        """
        Runs a synchronous allreduce in place. Returns None when it is over; returns the operation if other operations must run before it.
        """

    def peers(self, *, kind: Kind, count: int, dtype: DType, root: int = -1, wire: Codec = Codec.NONE, priority: int = 0) -> list[int]:
        """Ranks of other hosts that such a call sends to."""

    def add_outgoing(self, rank: int, fd: int) -> None:
        """Adds a connected socket to send payload to `rank`, and owns it."""

    def add_incoming(self, rank: int, fd: int) -> None:
        """Adds a connected socket to receive payload from `rank`, and owns it."""

    def abort(self) -> None: ...

    def rethrow(self) -> None:
        """Raises the error that broke the group, if any."""

    def records(self) -> list[dict[str, object]]:
        """The last operations, oldest first, with times of the monotonic clock."""

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """
        Sets the rules that choose the algorithms between hosts. REQUIRES: equal rules on all ranks, and no operation in flight.
        """

    def withdrawals(self) -> set[int]:
        """
        Numbers of operations that will end as cancelled when their turn comes; on rank 0 only.
        """

    def set_timeout(self, seconds: float) -> None: ...

    @property
    def network_bytes_sent(self) -> int:
        """Bytes this rank has sent to other hosts."""

class P2PEngine:
    """Point-to-point messages between the ranks of a group."""

    def __init__(self, *, rank: int, world: int) -> None: ...

    def add_outgoing(self, rank: int, fd: int) -> None:
        """Adds a connected socket to send messages to `rank`, and owns it."""

    def heard_from(self, rank: int) -> bool:
        """
        True if `rank`, another rank of the group, has ever had a link to this rank.
        """

    def add_incoming(self, rank: int, fd: int) -> None:
        """Adds a connected socket to receive from `rank`, and owns it."""

    def send(self, to: int, tag: int, data: int, bytes: int, seconds: float, attended: bool) -> Operation:
        """
        Sends `bytes` bytes at address `data`, which must stay alive until the operation is over. seconds <= 0: no deadline. attended: the caller calls wait() next.
        """

    def receive(self, source: int, tag: int, data: int, bytes: int, seconds: float, attended: bool) -> Operation:
        """Receives from rank `source`, or from any rank (-1); see send()."""

    def wait(self, operation: Operation, seconds: float) -> bool:
        """Waits like Operation.wait, but this thread moves the bytes meanwhile."""

    def fail(self, message: str, rank: int = -1) -> None:
        """Ends all present and later messages with this error."""

def load_ucx() -> None:
    """
    Raises CollectiveError, which names the package to install, if a group over UCX cannot be made.
    """

def control_bytes(members: int) -> int: ...

class Algorithm(enum.Enum):
    RING = 1

    TREE = 2

    DIRECT = 3

    CHAIN = 4

class Rule:
    """
    Algorithm for calls of `kind` on at least `hosts` hosts and of at most `bytes` bytes.
    """

    def __init__(self, *, kind: Kind, hosts: int, bytes: int, algorithm: Algorithm, lanes: int) -> None:
        """bytes: ANY_BYTES is no limit; lanes: the most lanes to use, 0 for all."""

    @property
    def kind(self) -> Kind: ...

    @property
    def hosts(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def algorithm(self) -> Algorithm: ...

    @property
    def lanes(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __repr__(self) -> str: ...

ANY_BYTES: int = 18446744073709551615

def default_rules() -> list[Rule]:
    """Rules that are used where no other rule applies."""

def choose_rule(rules: Sequence[Rule], kind: Kind, hosts: int, bytes: int) -> Rule:
    """
    Returns the first of the rules that applies; if none does, the first of the default rules.
    """

class NumaMode(enum.Enum):
    INTERLEAVE = 0

    BIND = 1

class Placed:
    """A range of a segment and the memory nodes for it."""

    def __init__(self, *, offset: int, bytes: int, mode: NumaMode, nodes: Sequence[int]) -> None: ...

    @property
    def offset(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def mode(self) -> NumaMode: ...

    @property
    def nodes(self) -> list[int]: ...

def control_placement(members: int, interface: str) -> list[Placed]:
    """
    Returns the memory nodes for the parts of a control segment, for a network interface; empty on one node.
    """

def create_segment(name: str, bytes: int, placement: Sequence[Placed] = []) -> int:
    """
    Creates a zeroed and reserved shared segment. Returns its descriptor, which the caller closes.
    """

class Device:
    """A device's runtime; lives as long as the process."""

class FakeDevice(Device):
    """A device for tests: plain memory, and streams with delays."""

    def make_stream(self) -> int: ...

    def copy(self, stream: int, to: int, source: int, bytes: int) -> None:
        """Queues a copy, as the user's computation."""

    def stop(self, stream: int) -> None:
        """Stops a stream before its next command."""

    def go_on(self, stream: int) -> None: ...

    def synchronize(self, stream: int) -> None: ...

    def history(self) -> list[str]:
        """Commands that have run, in order: 'stream command'."""

    @property
    def pinned_bytes(self) -> int: ...

    @property
    def live_events(self) -> int: ...

def fake_device(delay_us: int = 0) -> FakeDevice:
    """Makes a fake device that waits `delay_us` before each command."""

def cuda_device(index: int) -> Device:
    """Opens a CUDA device with the CUDA runtime of this process."""

class Passage:
    """A call on device memory, until the device has finished with it."""

    def follow(self, stream: int) -> None:
        """Makes the stream wait until the results are in the device's memory."""

    def extend(self, stream: int) -> None:
        """
        Makes streams that follow from now on also wait for the current work in this stream.
        """

    @property
    def finished(self) -> bool:
        """True when the device's memory is no longer accessed."""

    def wait(self, seconds: float = -1.0) -> bool:
        """
        Waits until the passage is finished; returns False if `seconds` pass first (< 0: no limit).
        """

class Stager:
    """Stages the calls of one group on one device."""

    def __init__(self, device: Device) -> None: ...

    def submit(self, *, group: Group, stream: int, counts: Sequence[int], kind: Kind, inputs: Sequence[tuple[int, int]], outputs: Sequence[tuple[int, int]], count: int, dtype: DType, op: ReduceOp = ReduceOp.SUM, root: int = -1, wire: Codec = Codec.NONE, residual: int = 0, seed: int = 0, priority: int = 0, label: int = 0, timeout_s: float = 0.0) -> tuple[list[Operation], Passage]:
        """
        Submits a call on device memory (see Group.submit) after the current work in `stream`. `counts`: the elements of each operation into which the call is cut. Memory must stay alive until the passage is finished.
        """

def arena_block(bytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
    """Allocates zero-copy memory as a uint8 array; freed with the array."""

def arena_reserved_bytes() -> int:
    """Shared memory that this process holds for zero-copy tensors."""

def in_arena(data: int, bytes: int) -> bool:
    """True if these bytes lie in zero-copy memory."""
