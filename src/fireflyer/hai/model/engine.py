"""The interface between the platform and its engines: a gang, its events, and the `Engine` calls.

The server decides; an engine executes and reports. `local` runs gangs as supervised processes of
this machine; `slurm` has Slurm start the supervisors on the nodes of a partition.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from fireflyer.hai.model.observations import KernelObservation


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """Machine, or virtual node, that can run one node's part of a gang."""

    name: str
    """Name, unique in the engine; the ranks get it as FIREFLYER_NODE."""
    state: Literal["up", "drained", "down"] = "up"
    """drained: running work continues, and no new work is placed there; down: no work runs
    there."""
    reason: str = ""
    """Reason why the node is not up, as text for users."""
    gpus: int = 0
    gpu_type: str = ""
    """Type of its GPUs, e.g. "a100-pcie-40gb"; empty: not known."""
    indexed: bool = True
    """True if the platform chooses the GPUs of a gang by index; False: the engine does."""
    cpus: int = 0
    """Number of CPUs; 0: unknown."""
    memory_mib: int = 0
    """Memory in MiB; 0: unknown."""
    leaf: str = ""
    """Switch that the node is attached to; empty: unknown."""
    zone: str = ""
    """Part of the network to which the leaf belongs; empty: unknown, or the network has one
    zone."""
    whole: bool = False
    """True if a gang that asks for part of the node gets the complete node, so that it holds one
    gang at a time."""
    unheld: str = ""
    """Limits of gangs that the node does not enforce, and why, as text; empty: the node enforces
    all."""


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a task: `ranks_per_node` processes on each of `nodes`, started and ended together."""

    task: str
    """Id of the task, e.g. "t17"; names its directory."""
    attempt: int
    """Number from 1; a new attempt fences older attempts."""
    script: str
    """Absolute path of the Python script."""
    args: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    """Complete environment of the ranks, without the FIREFLYER_* and rendezvous names, which the
    engine adds."""
    nodes: tuple[str, ...]
    """Nodes in rank order: a rank is the index of its node in this tuple * ranks_per_node + the
    local rank."""
    ranks_per_node: int
    start: Literal["auto", "fork", "exec"]
    """fork: ranks are forked from a warm fork server, which is kept for the next attempt; exec:
    each rank is a fresh interpreter; auto: fork if the script, or an earlier attempt, imports
    torch."""
    secret: str
    """Hex secret of the task, given to the ranks as FIREFLYER_SECRET; never logged."""
    directory: Path
    """Folder of this attempt, for `<rank>.log` and the engine's own files."""
    elastic: bool = False
    """True if the loss of some ranks does not end the attempt, once its ranks accept newcomers."""
    rejoins: int = 0
    """Maximum number of newcomers per rank in this attempt; elastic gangs only."""
    python: str = ""
    """Interpreter of the ranks; empty: the platform's."""
    gpus: int = 0
    """GPUs of each node; 0: whole nodes."""
    gpu_type: str = ""
    """Type of GPUs that the task asked for; empty: any."""
    devices: tuple[tuple[int, ...], ...] = ()
    """Indexes of the GPUs on each of `nodes`; empty: the engine chooses, or the nodes have no
    GPUs."""
    memory_mib: int = 0
    """Maximum MiB on each node; 0: no limit, except that a Slurm job on a shared node gets memory in
    proportion to its GPUs."""
    cpus: int = 0
    """Maximum cores on each node; 0: no limit, with the same exception as for `memory_mib`."""


class RankStarted(msgspec.Struct, frozen=True, kw_only=True, tag="rank_started"):
    task: str
    attempt: int
    rank: int
    node: str
    pid: int
    monotonic_ns: int
    """CLOCK_MONOTONIC at which the engine saw the start."""
    wall: float
    incarnation: int = 0
    """0: launched with the gang; n: the n-th newcomer in this rank's place."""


class RankJoined(msgspec.Struct, frozen=True, kw_only=True, tag="rank_joined"):
    """Newcomer that the other members of an elastic attempt have admitted as a member."""

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
    """Exit status; None if a signal ended the rank."""
    signal: int | None
    """Signal number. `code` and `signal` are both None if an elastic attempt lost the rank with
    its node, or if the newcomer could not be started."""
    suspended: bool
    """True if the rank acknowledged a suspend by `fireflyer.hai.suspended()` before it ended."""
    monotonic_ns: int
    wall: float
    incarnation: int = 0
    joined: bool = True
    """True if the rank was a member; False for a newcomer that was never admitted."""
    lost: bool = False
    """True for a lost member of an elastic attempt that continues without the member."""


Outcome = Literal["finished", "failed", "stopped", "suspended", "lost"]


class GangEnded(msgspec.Struct, frozen=True, kw_only=True, tag="gang_ended"):
    """End of an attempt: none of its processes is left on any node."""

    task: str
    attempt: int
    outcome: Outcome
    """finished: every rank returned 0 (elastic: every remaining member); failed: a rank did not
    return 0; stopped and suspended: as requested; lost: a supervisor died, which also ended its
    ranks."""
    reason: str
    """Line of text for users, e.g. "rank 1 on n1 was killed by SIGKILL"."""
    monotonic_ns: int
    wall: float
    lost: tuple[str, ...] = ()
    """Nodes whose supervisors died, unless Slurm ended the job."""


class NodeObserved(msgspec.Struct, frozen=True, kw_only=True, tag="node_observed"):
    """Entry of a node's kernel log while the attempt ran there."""

    task: str
    attempt: int
    node: str
    observation: KernelObservation
    """Observation of this node; its `rank` is a rank of this attempt, or None."""
    monotonic_ns: int
    wall: float


EngineEvent = RankStarted | RankJoined | RankExited | GangEnded | NodeObserved


class NodesChanged(msgspec.Struct, frozen=True, kw_only=True, tag="nodes_changed"):
    """The result of `nodes()` has changed."""


class Engine(Protocol):
    """Interface that the platform requires of an engine. Every call is idempotent."""

    def nodes(self) -> list[Node]:
        """Returns the current nodes."""
        ...

    async def prepare(self, gang: Gang) -> None:
        """Does slow preparations before the launch, so that the launch is not delayed by seconds.
        Optional; may be cancelled."""
        ...

    async def launch(self, gang: Gang) -> None:
        """Starts the gang. A failure to start is reported as GangEnded(failed), not raised."""
        ...

    async def recover(self, gang: Gang) -> None:
        """Recovers a gang that an earlier server process launched. The gang's events since then
        follow, each at least once, or GangEnded(lost) if its supervisors are gone."""
        ...

    async def suspend(self, task: str, attempt: int, grace_s: float) -> None:
        """Asks every rank to save and exit: `suspend_requested()` turns true at one call number on
        all ranks. Ranks that still run after `grace_s` are killed. The outcome is `suspended`,
        even if ranks are killed or fail while they exit. Only if every rank returns 0 before
        `suspend_requested()` has returned true to any rank, the outcome is `finished`."""
        ...

    async def stop(self, task: str, attempt: int, grace_s: float) -> None:
        """Sends SIGTERM to every rank, SIGKILL after `grace_s` (0: at once); the outcome is
        `stopped`. If the call is repeated, the earlier deadline counts."""
        ...

    async def fail(self, task: str, attempt: int, reason: str) -> None:
        """Ends the attempt as `failed` with this reason. First sends `heartbeat.STACKS_SIGNAL` to
        its ranks, which then write their stacks. Has no effect if the attempt has ended, or if a
        stop or suspend was requested."""
        ...

    async def drain(self, node: str, reason: str) -> None:
        """Drains a node: no new work is placed there until `undrain`. Running work continues.

        Raises:
            TaskError: no such node, or the node may not be drained.
        """
        ...

    async def undrain(self, node: str) -> None:
        """Ends the drain of a node.

        Raises:
            TaskError: no such node, or the node may not be changed.
        """
        ...

    async def release(self, task: str, directory: Path | None = None) -> None:
        """Releases the warm processes that the engine keeps for the task's next attempt
        (supervisors, fork servers). An attempt that still runs ends as `stopped`. Returns when no
        process is left.

        Args:
            directory: folder of the task; if given, also releases warm processes of an earlier
                server's engine.
        """
        ...

    def events(self) -> AsyncIterator[EngineEvent | NodesChanged]:
        """Yields the events, in order for each task; ends when the engine is closed. Only one
        reader may call this method."""
        ...

    async def close(self) -> None:
        """Closes the engine without ending any process: gangs keep running and can be recovered."""
        ...
