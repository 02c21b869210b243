"""Kinds of observation of a task or a node. Each is recorded in the history as an event `observed`.

Each observation names the node that it is about, or "" if no single node is at fault, as for a hang
of a complete gang.
"""

import msgspec

from fireflyer.units import format_mib


class _Observed(msgspec.Struct, frozen=True, kw_only=True, tag_field="what"):
    node: str = ""
    wall: float = 0.0
    """Seconds since 1970."""


class Exit(_Observed, frozen=True, kw_only=True, tag="exit"):
    """First rank of an attempt that did not return 0."""

    rank: int
    code: int | None
    signal: int | None
    place: str = ""
    """Place where the rank ended, from its log: "train.py:17 ValueError", or the log's last
    line."""
    ran_s: float = 0.0
    """Seconds since the rank's start."""

    def text(self) -> str:
        how = f"exit {self.code}" if self.signal is None else f"signal {self.signal}"
        return f"rank {self.rank}: {how}" + (f" at {self.place}" if self.place else "")


class Loss(_Observed, frozen=True, kw_only=True, tag="loss"):
    """Loss of a member of an elastic attempt; the other members continue."""

    rank: int
    code: int | None
    signal: int | None
    """Signal; if `code` is None too, the rank was lost with its node."""
    place: str = ""
    """Same as `place` of an Exit."""

    @property
    def with_node(self) -> bool:
        return self.code is None and self.signal is None

    def text(self) -> str:
        how = f"exit {self.code}" if self.signal is None else f"signal {self.signal}"
        where = f" at {self.place}" if self.place else ""
        lost = f"lost with {self.node}" if self.with_node else f"lost: {how}{where}"
        return f"rank {self.rank}: {lost}; the other ranks continue"


class OutOfMemory(_Observed, frozen=True, kw_only=True, tag="oom"):
    """Kill of a process by the kernel's out of memory killer."""

    pid: int
    """Process; 0: not known."""
    rank: int | None = None
    """Rank of the process; None: the process was not a rank."""
    line: str = ""
    limited: bool = False
    """True if a limit was reached; False: the memory of the node was used up."""
    limit_mib: int = 0
    """Limit that the task asked for; 0: another limit, or not known."""

    def text(self) -> str:
        who = f"pid {self.pid}" if self.pid else "a process of the task"
        who = who if self.rank is None else f"rank {self.rank}"
        limit = f"limit {format_mib(self.limit_mib)} of the task, " if self.limit_mib else ""
        return f"out of memory: {limit}the kernel killed {who}"


class SupervisorLost(_Observed, frozen=True, kw_only=True, tag="silence"):
    """Loss of a node's supervisor: the node died, or the supervisor was killed."""

    reason: str

    def text(self) -> str:
        return self.reason


class Hang(_Observed, frozen=True, kw_only=True, tag="hang"):
    """Hang of a gang: no rank wrote to its log or sent a heartbeat."""

    quiet_s: float
    rank: int | None = None
    """Rank on `node` that is at an earlier step than all others; None: several ranks are at the
    earliest step, or the steps are not known."""

    def text(self) -> str:
        who = "" if self.rank is None else f"; rank {self.rank} is behind"
        return f"hung: no output and no heartbeat for {self.quiet_s:g} s{who}"


class Straggler(_Observed, frozen=True, kw_only=True, tag="straggler"):
    """A rank that was slower than the median of its gang in many consecutive steps."""

    rank: int
    factor: float
    """Mean ratio of the rank's time to the median time of all ranks, over these steps."""
    steps: int

    def text(self) -> str:
        slow = f"{self.factor:.1f} times as slow as the median"
        return f"rank {self.rank} is {slow}, {self.steps} steps in a row"


class Xid(_Observed, frozen=True, kw_only=True, tag="xid"):
    """An error that the NVIDIA driver reported."""

    code: int
    device: str
    """PCI address."""
    pid: int | None = None
    rank: int | None = None
    line: str = ""

    def text(self) -> str:
        return f"Xid {self.code} on {self.device}" + (
            "" if self.rank is None else f" (rank {self.rank})"
        )


class Network(_Observed, frozen=True, kw_only=True, tag="network"):
    """A message of a network card's driver."""

    device: str
    state: str
    """down, up, or error."""
    line: str = ""

    def text(self) -> str:
        return f"network {self.device}: {self.state}"


class Memory(_Observed, frozen=True, kw_only=True, tag="memory"):
    """An error of main memory that EDAC or a machine check reported."""

    corrected: bool
    line: str = ""

    def text(self) -> str:
        return f"{'a corrected' if self.corrected else 'an uncorrected'} error of main memory"


class Validator(_Observed, frozen=True, kw_only=True, tag="validator"):
    """Result of a check of a node's hardware, submitted through `Client.observed`."""

    check: str
    """Name of the check, for example "gemm", "memory bandwidth"."""
    passed: bool
    result: str = ""

    def text(self) -> str:
        return f"check {self.check} {'passed' if self.passed else 'failed'}" + (
            f": {self.result}" if self.result else ""
        )


Observation = (
    Exit
    | Loss
    | OutOfMemory
    | SupervisorLost
    | Hang
    | Straggler
    | Xid
    | Network
    | Memory
    | Validator
)

KernelObservation = OutOfMemory | Xid | Network | Memory

KINDS: tuple[str, ...] = (
    *("exit", "loss", "oom", "silence", "hang"),
    *("straggler", "xid", "network", "memory", "validator"),
)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One past observation, for rules that count."""

    task: str
    attempt: int
    observation: Observation


def kind(observation: Observation) -> str:
    """Returns one of KINDS."""
    return str(observation.__struct_config__.tag)
