"""What the engine, a node's supervisor and its fork server say to each other, and a line of the journal.

Engine and supervisor exchange msgpack in frames; a supervisor answers each request that has an
answer on the connection that asked, and pushes records to every connection that attached.
"""

from typing import Literal

import msgspec

from fireflyer.hai.engines import NodeObserved, RankExited, RankJoined, RankStarted

Cause = Literal["finished", "failed", "aborted", "suspended", "stopped", "vacant"]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One node's share of a gang."""

    task: str
    attempt: int
    node: str
    script: str
    args: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    """The user's environment; the supervisor adds the names of the rank environment."""
    first_rank: int
    ranks: int
    world_size: int
    start: Literal["fork", "exec"]
    secret: str
    directory: str
    """Of the attempt: logs and journals."""
    port: int
    """Rendezvous port of the attempt; 0 asks this supervisor to reserve one."""
    preload: tuple[str, ...]
    """Modules that a fork server imports before its first fork."""
    master: str = "127.0.0.1"
    """Where the gang's first node is reached: the ranks' MASTER_ADDR."""
    address: str = "127.0.0.1"
    """Where this node is reached."""
    elastic: bool = False
    python: str = ""
    """The interpreter of the ranks; empty: that of the supervisor."""
    kernel_log: str = ""
    """What to read of the node's kernel; "" or "off": nothing."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag="launch"):
    """Starts an attempt; ends an older one first. Answered by Launched."""

    part: Part


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """As Launch, of the part that lies in the attempt's folder, for whoever reads the wire is to learn
    nothing from it and can have nothing executed."""

    attempt: int
    port: int


class Newcomer(msgspec.Struct, frozen=True):
    """Takes the place of a rank that was lost."""

    rank: int
    incarnation: int


class Enlist(msgspec.Struct, frozen=True, kw_only=True, tag="enlist"):
    """Starts newcomers of an elastic attempt; opens the part again where it is vacant or not known here.

    No answer but records: each newcomer's RankStarted, or its RankExited alone where it cannot be started.
    One that was started before changes nothing.
    """

    part: Part
    newcomers: tuple[Newcomer, ...]


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """Answered by Attached, then every record of the attempt so far and from now on."""

    attempt: int


class Freeze(msgspec.Struct, frozen=True, kw_only=True, tag="freeze"):
    """First phase of a suspend: from now on the ranks' questions wait for Decide. Answered by Frozen."""

    attempt: int
    grace_s: float


class Decide(msgspec.Struct, frozen=True, kw_only=True, tag="decide"):
    """Second phase: calls from `number` on are answered with true."""

    attempt: int
    number: int


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """stop: SIGTERM, and SIGKILL after the grace; abort: SIGKILL, because another node failed."""

    attempt: int
    how: Literal["stop", "abort"]
    grace_s: float


class Condemn(msgspec.Struct, frozen=True, kw_only=True, tag="condemn"):
    """The ranks write their stacks, then the part fails for this reason."""

    attempt: int
    reason: str


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """Ends everything of the task on this node, then the supervisor itself."""


Request = Launch | Start | Enlist | Attach | Freeze | Decide | End | Condemn | Leave


class Launched(msgspec.Struct, frozen=True, kw_only=True, tag="launched"):
    attempt: int
    port: int


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag="attached"):
    attempt: int
    known: bool
    """False where this supervisor never ran the attempt, or has begun a later one."""
    grace_s: float | None
    """Of the suspend under way, whose second phase may be missing."""


class Frozen(msgspec.Struct, frozen=True, kw_only=True, tag="frozen"):
    attempt: int
    highest: int
    """Highest call number that was answered with false before the freeze, over the node's ranks."""
    decision: int
    """0 before the second phase."""


class PartEnded(msgspec.Struct, frozen=True, kw_only=True, tag="part_ended"):
    """No process of the attempt is left on the node."""

    node: str
    cause: Cause
    """finished: every rank returned 0 and no stop was asked for; aborted: killed because of another node;
    vacant: an elastic attempt has no rank here any more, and not all returned 0; newcomers may open the part
    again."""
    reason: str
    told: bool
    """A rank of the node was answered true, acknowledged a suspend, or got its SIGTERM."""
    highest: int
    """As in Frozen; of all calls where there was no freeze."""
    failed_ns: int
    """CLOCK_MONOTONIC of the first failure on the node; 0: none."""
    monotonic_ns: int
    wall: float


class Record(msgspec.Struct, frozen=True, kw_only=True, tag="record"):
    """A line of the node's journal of an attempt; `seq` counts from 1, over all supervisors that write it."""

    attempt: int
    seq: int
    event: RankStarted | RankJoined | RankExited | NodeObserved | PartEnded


Reply = Launched | Attached | Frozen | Record


TITLE_ROOM = " " * 2000
"""The last argument of a fork server and of a zygote: room for the command lines of ranks in `ps`."""


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start."""

    rank: int
    script: str
    args: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    log: str
    incarnation: int = 0


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag="fork"):
    """Supervisor to fork server: start these as children of `parent`. Answered by Forked or Refused."""

    ranks: tuple[RankSpec, ...]
    parent: int


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """Engine to zygote, with descriptors of /dev/null, of the log and of the listening socket: a guard, a
    supervisor and a fork server for the task on the node. Answered by the guard's pid in decimal."""

    task: str
    node: str
    python: str
    env: dict[str, str]
    """Interpreter and environment of guard and supervisor."""
    marks: dict[str, str]
    """Variables by which the fork server and its ranks are found."""


PRESENT = b"?"
"""Engine to zygote: whether what it has imported is what lies on the disk. Answered, or it leaves."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The fork server has imported what it was asked to."""


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag="forked"):
    pids: tuple[int, ...]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    reason: str


ForkReply = Ready | Forked | Refused
