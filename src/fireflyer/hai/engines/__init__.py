"""The seam between the platform and whatever runs processes: a gang, its events, and the `Engine` calls.

The server decides; an engine executes and reports. `local` runs gangs as supervised processes
of this machine, `slurm` has Slurm start the supervisors on the nodes of a partition.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from fireflyer.hai.faults.observations import KernelObservation


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A place that can hold one gang member."""

    name: str
    """Unique in the engine; given to the ranks as FIREFLYER_NODE."""
    state: Literal["up", "drained", "down"] = "up"
    """drained: what runs there goes on, and nothing new is to be placed there; down: nothing runs there."""
    reason: str = ""
    """Why it is not up, for people."""
    gpus: int = 0
    cpus: int = 0
    """0: not known."""
    memory_mib: int = 0
    """0: not known."""
    leaf: str = ""
    """The switch that it hangs on; empty: not known."""
    zone: str = ""
    """The part of the network that its leaf is in; empty: not known, or there is but one."""
    whole: bool = False
    """A gang that asks for a part of it gets all of it: it is given to one at a time."""


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a task: `ranks_per_node` processes on each of `nodes`, started and ended together."""

    task: str
    """Id of the task, e.g. "t17"; names its directory."""
    attempt: int
    """Counts from 1; a new attempt fences the older ones."""
    script: str
    """Absolute path of the Python script."""
    args: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    """The whole environment of the ranks, without the FIREFLYER_* and rendezvous names, which
    the engine adds."""
    nodes: tuple[str, ...]
    """Rank = index of the node here * ranks_per_node + local rank."""
    ranks_per_node: int
    start: Literal["auto", "fork", "exec"]
    """fork: from a warmed fork server, kept for the next attempt; exec: a fresh interpreter a rank; auto:
    fork where the script, or an earlier attempt, imports torch."""
    secret: str
    """Hex secret of the task, given to the ranks as FIREFLYER_SECRET; never logged."""
    directory: Path
    """Directory of this attempt; `<rank>.log` and the engine's own files go there."""
    elastic: bool = False
    """Once its ranks have opened their doors, the loss of some does not end it."""
    rejoins: int = 0
    """How often each rank may be started again in this attempt, as a newcomer; elastic gangs only."""
    python: str = ""
    """The interpreter of the ranks; empty: that of the platform."""
    gpus: int = 0
    """Of each node; 0: the nodes whole."""
    memory_mib: int = 0
    """Of each node, where the nodes are not taken whole; 0: a share as large as that of the GPUs."""


class RankStarted(msgspec.Struct, frozen=True, kw_only=True, tag="rank_started"):
    task: str
    attempt: int
    rank: int
    node: str
    pid: int
    monotonic_ns: int
    """CLOCK_MONOTONIC when the engine saw it."""
    wall: float
    incarnation: int = 0
    """0: launched with the gang; n: the n-th newcomer in its place."""


class RankJoined(msgspec.Struct, frozen=True, kw_only=True, tag="rank_joined"):
    """A newcomer has become a member of an elastic attempt: the others have let it in."""

    task: str
    attempt: int
    rank: int
    node: str
    incarnation: int
    monotonic_ns: int
    wall: float


class RankExited(msgspec.Struct, frozen=True, kw_only=True, tag="rank_exited"):
    task: str
    attempt: int
    rank: int
    node: str
    code: int | None
    """Exit status, or None when a signal ended it."""
    signal: int | None
    """None, too: an elastic attempt lost the rank with its node, or the newcomer could not be started."""
    suspended: bool
    """The rank acknowledged a suspend by `fireflyer.hai.suspended()` before it ended."""
    monotonic_ns: int
    wall: float
    incarnation: int = 0
    joined: bool = True
    """It was a member; False for a newcomer that was never let in."""
    lost: bool = False
    """A member of an elastic attempt that the others go on without."""


class GangEnded(msgspec.Struct, frozen=True, kw_only=True, tag="gang_ended"):
    """No process of the attempt is left on any node."""

    task: str
    attempt: int
    outcome: Literal["finished", "failed", "stopped", "suspended", "lost"]
    """finished: every rank returned 0 (elastic: every member that was left); failed: a rank did not; stopped
    and suspended: as asked for; lost: a supervisor died and took its ranks with it."""
    reason: str
    """One line for people, e.g. "rank 1 on n1 was killed by SIGKILL"."""
    monotonic_ns: int
    wall: float
    lost: tuple[str, ...] = ()
    """Nodes whose supervisors died, but not because Slurm ended the job."""


class NodeObserved(msgspec.Struct, frozen=True, kw_only=True, tag="node_observed"):
    """What the kernel's log of a node said while the attempt ran there."""

    task: str
    attempt: int
    node: str
    observation: KernelObservation
    """About this node; its `rank` is one of this attempt, or None."""
    monotonic_ns: int
    wall: float


EngineEvent = RankStarted | RankJoined | RankExited | GangEnded | NodeObserved


class NodesChanged(msgspec.Struct, frozen=True, kw_only=True, tag="nodes_changed"):
    """`nodes()` answers otherwise than before."""


class Engine(Protocol):
    """What the platform needs of an engine. Every call may be repeated to no further effect."""

    def nodes(self) -> list[Node]:
        """The nodes as of now."""
        ...

    async def prepare(self, gang: Gang) -> None:
        """Makes ready what would have the launch wait for seconds. It may be left out, or cancelled."""
        ...

    async def launch(self, gang: Gang) -> None:
        """Starts the gang. A failure to start is reported as GangEnded(failed), not raised."""
        ...

    async def recover(self, gang: Gang) -> None:
        """Takes up a gang that an earlier server process launched: its events since then follow,
        each at least once, or GangEnded(lost) if its supervisors are gone."""
        ...

    async def suspend(self, task: str, attempt: int, grace_s: float) -> None:
        """Asks every rank to save and leave: `suspend_requested()` turns true at one call number on
        all ranks. Ranks that have not left after `grace_s` are ended; the outcome is
        `suspended` either way, also when a rank fails on its way out. Only when every rank returns 0
        before any was told true has the task `finished`."""
        ...

    async def stop(self, task: str, attempt: int, grace_s: float) -> None:
        """SIGTERM to every rank, SIGKILL after `grace_s` (0: at once); the outcome is `stopped`.
        Repeated, the earlier deadline counts."""
        ...

    async def fail(self, task: str, attempt: int, reason: str) -> None:
        """Ends the attempt as `failed` with this reason. First its ranks write their stacks: what they do on
        `pulse.STACKS_SIGNAL`. No effect once it has ended, or was asked to end otherwise."""
        ...

    async def drain(self, node: str, reason: str) -> None:
        """Marks the node: nothing new is to be placed there until `undrain`. What runs there goes on.

        Raises:
            TaskError: no such node, or it may not be drained.
        """
        ...

    async def undrain(self, node: str) -> None:
        """Takes the mark off.

        Raises:
            TaskError: no such node, or it may not be changed.
        """
        ...

    async def release(self, task: str, directory: Path | None = None) -> None:
        """Gives back what the engine kept warm for the task's next attempt (supervisors, fork servers);
        an attempt that still runs is ended as `stopped`. Returns when no process is left.

        Args:
            directory: of the task: also what an earlier server's engine kept warm there is given back.
        """
        ...

    def events(self) -> AsyncIterator[EngineEvent | NodesChanged]:
        """What happened, in order for each task; ends when the engine is closed. One reader."""
        ...

    async def close(self) -> None:
        """Lets go without ending anything: gangs run on and can be recovered."""
        ...
