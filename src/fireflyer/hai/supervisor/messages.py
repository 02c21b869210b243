"""Messages between the engine, a node's supervisor and its fork server, and records of the journal.

Engine and supervisor exchange msgpack in frames. A supervisor sends each answer on the connection
of the request, and pushes records to every attached connection.
"""

from typing import Literal

import msgspec

from fireflyer.hai.model.engine import NodeObserved, RankExited, RankJoined, RankStarted
from fireflyer.hai.supervisor.cgroups import Limits

Cause = Literal["finished", "failed", "aborted", "suspended", "stopped", "vacant"]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a gang on one node."""

    task: str
    attempt: int
    node: str
    script: str
    args: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    """The user's environment; the supervisor adds the variables of each rank."""
    first_rank: int
    ranks: int
    world_size: int
    start: Literal["fork", "exec"]
    secret: str
    directory: str
    """Folder of the attempt: logs and journals."""
    port: int
    """Rendezvous port of the attempt; 0: this supervisor must reserve a port."""
    preload: tuple[str, ...]
    """Modules that a fork server imports before its first fork."""
    master: str = "127.0.0.1"
    """Address of the gang's first node: the ranks' MASTER_ADDR."""
    address: str = "127.0.0.1"
    """Address of this node."""
    elastic: bool = False
    python: str = ""
    """Interpreter of the ranks; empty: the supervisor's."""
    devices: tuple[str, ...] | None = None
    """The ranks' GPUs, as named in CUDA_VISIBLE_DEVICES; None: do not set the variable."""
    sampled: tuple[int, ...] = ()
    """NVML indexes of the GPUs whose load the supervisor samples."""
    kernel_log: str = ""
    """Kernel log of the node to read; "" or "off": read no log."""
    limits: Limits = Limits()


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag="launch"):
    """Request: start an attempt, after ending an older attempt. Answered by Launched."""

    part: Part


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Request like Launch, for the part in the attempt's folder. The message contains no secret and
    no program, so an attacker on the network learns nothing and cannot make the node run code."""

    attempt: int
    port: int


class Newcomer(msgspec.Struct, frozen=True):
    """Process that takes the place of a lost rank."""

    rank: int
    incarnation: int
    """Number of the rank's process: 0 for the first, larger for each newcomer."""


class Enlist(msgspec.Struct, frozen=True, kw_only=True, tag="enlist"):
    """Request: start newcomers of an elastic attempt. Opens the part again if it is vacant or not
    known to this supervisor.

    The only answers are records: each newcomer's RankStarted, or only its RankExited if it cannot
    be started. A newcomer that was already started is ignored.
    """

    part: Part
    newcomers: tuple[Newcomer, ...]


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """Request: subscribe to the records of the attempt. The supervisor sends all records so far,
    then Attached, then each new record."""

    attempt: int


class Freeze(msgspec.Struct, frozen=True, kw_only=True, tag="freeze"):
    """Request: first phase of a suspend. From now on the ranks' calls of `suspend_requested()` wait
    for Decide. Answered by Frozen."""

    attempt: int
    grace_s: float


class Decide(msgspec.Struct, frozen=True, kw_only=True, tag="decide"):
    """Request: second phase of a suspend. The ranks' calls of `suspend_requested()` return true
    from call `number` on."""

    attempt: int
    number: int


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """Request: end the part. stop: SIGTERM, and SIGKILL after the grace; abort: SIGKILL at once,
    because another node failed."""

    attempt: int
    how: Literal["stop", "abort"]
    grace_s: float


class Condemn(msgspec.Struct, frozen=True, kw_only=True, tag="condemn"):
    """Request: the ranks write their stacks, then the part fails for this reason."""

    attempt: int
    reason: str


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """Request: end all processes of the task on this node, then the supervisor itself."""


Request = Launch | Start | Enlist | Attach | Freeze | Decide | End | Condemn | Leave


class Launched(msgspec.Struct, frozen=True, kw_only=True, tag="launched"):
    attempt: int
    port: int


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag="attached"):
    attempt: int
    known: bool
    """False if this supervisor never ran the attempt, or has started a later one."""
    grace_s: float | None
    """Grace period of the suspend in progress, which may still wait for Decide; None: no
    suspend."""


class Frozen(msgspec.Struct, frozen=True, kw_only=True, tag="frozen"):
    attempt: int
    highest: int
    """Highest number of a `suspend_requested()` call, over the node's ranks, that returned false
    before the freeze."""
    decision: int
    """Decided call number; 0 before the second phase."""


class PartEnded(msgspec.Struct, frozen=True, kw_only=True, tag="part_ended"):
    """End of a node's part: no process of the attempt is left on the node."""

    node: str
    cause: Cause
    """finished: every rank returned 0 and no stop was requested; aborted: killed because of another
    node or a newer attempt; vacant: an elastic attempt has no rank left on this node, and not all
    returned 0. Newcomers may open a vacant part again."""
    reason: str
    told: bool
    """True if a rank's call of `suspend_requested()` returned true, or if a rank acknowledged the
    suspend or got SIGTERM because of the suspend."""
    highest: int
    """Highest number of a `suspend_requested()` call, as in Frozen. Without a freeze, all calls
    count."""
    failed_ns: int
    """CLOCK_MONOTONIC of the first failure on the node; 0: no failure."""
    monotonic_ns: int
    wall: float


class Record(msgspec.Struct, frozen=True, kw_only=True, tag="record"):
    """Line of a node's journal of an attempt; `seq` counts from 1, over all supervisors that write
    the journal."""

    attempt: int
    seq: int
    event: RankStarted | RankJoined | RankExited | NodeObserved | PartEnded


Reply = Launched | Attached | Frozen | Record


TITLE_ROOM = " " * 2000
"""Last argument of a fork server and of a zygote. The blanks reserve space for the command lines of
ranks in `ps`."""


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rank to start as a process."""

    rank: int
    script: str
    args: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    log: str
    incarnation: int = 0
    entrances: tuple[str, ...] = ()
    """Files into which the new process writes 0 to enter its cgroup."""


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag="fork"):
    """Supervisor to fork server: start these ranks as children of `parent`. Answered by Forked or
    Refused."""

    ranks: tuple[RankSpec, ...]
    parent: int


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """Engine to zygote: start a guard, a supervisor and a fork server for the task on the node.
    The message carries descriptors of /dev/null, the log and the listening socket. Answered by the
    guard's pid in decimal."""

    task: str
    node: str
    python: str
    env: dict[str, str]
    """Environment of guard and supervisor; `python` is their interpreter."""
    marks: dict[str, str]
    """Environment variables by which orphans of the fork server and its ranks can be found."""


PRESENT = b"?"
"""Engine to zygote: check whether the imported files are unchanged on disk. The zygote answers if
all of them are unchanged, else it exits."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Fork server to supervisor: the requested modules are imported."""


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag="forked"):
    pids: tuple[int, ...]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    reason: str


ForkReply = Ready | Forked | Refused
