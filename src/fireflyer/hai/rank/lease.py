"""Lease of an attempt, as a rank requests it: after a network partition one part continues.

An attempt begins at generation 0 with all its ranks. When its members change, the first of the new
members requests a later generation. The server lets each generation be followed once, by the first
part that asks.
"""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from fireflyer.errors import Corrupted, DeadlineExceeded, PeerLost, TaskError
from fireflyer.hai.client import Client
from fireflyer.hai.model import Lease, LeaseRequest
from fireflyer.hai.rank import begun, between, joined, task

GRACE_S = 2.0
"""Time that a part too small for a quorum waits, so that a larger part can ask first."""


_AGAIN_S = 0.2
"""Interval between two requests while the server is away."""


class _LeaseRenewer(msgspec.Struct):
    token: str
    held: int = 0


_askers: dict[int, _LeaseRenewer] = {}
"""Lease state by process id: a forked child asks with its own token."""


def _me() -> _LeaseRenewer:
    return _askers.setdefault(os.getpid(), _LeaseRenewer(secrets.token_hex(8)))


def in_task() -> bool:
    """Returns whether this process is a rank of a task. If not, no server grants leases: use a
    quorum."""
    return bool(task().id)


def hold(generation: int) -> None:
    """Records a newly formed generation, so that this process's next `lease` follows it. Every
    member calls this. Also reports a newcomer as a member."""
    _me().held = generation
    joined()


def _ask_until_answered(
    patience_s: float, generation: int, members: Sequence[str], minority: bool
) -> bool:
    """Calls `lease` until it succeeds or the patience ends, because a server that is away may
    return or be replaced."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return lease(generation, members, minority)
        except (PeerLost, DeadlineExceeded, Corrupted):  # a starting server has no address yet
            if time.monotonic() >= deadline:
                raise
        minority = False  # it has already waited for the larger part
        time.sleep(_AGAIN_S)


class Steps(Protocol):
    """Runner of the steps of an elastic job: `model.elastic` of HaiScale."""

    permit: Callable[[int, tuple[str, ...], bool], bool] | None
    """(generation, members, minority) -> whether this part may continue."""
    fenced: list[Callable[[int], None]]
    """Callbacks for a new generation once it is formed."""
    begun: list[Callable[[int, int], None]]
    """Callbacks at the start of each step, with the generation and the number of steps begun
    in it."""


def elastic(steps: Steps, *, patience_s: float = 60.0) -> None:
    """Connects an elastic job to its task. The lease decides which part continues, and the platform
    learns the members. `suspend_requested()` returns the same on all members, by step. Call it on
    every rank before the first step. It does nothing outside a task, where a quorum decides which
    part continues.

    Args:
        steps: of the job.
        patience_s: seconds that the members left after a loss wait for the server, if it is away.
    """
    if in_task():
        steps.permit = partial(_ask_until_answered, patience_s)
        steps.fenced[:0] = [hold, lambda _: between()]
        steps.begun.append(begun)


def lease(
    generation: int, members: Sequence[str], minority: bool = False, *, grace_s: float = GRACE_S
) -> bool:
    """Asks the server that only this part of the attempt continues. The first of its members calls
    it.

    The server grants the first request from the generation in force. It grants the same request
    from the same process again, so a process that lost the answer may repeat it.

    Args:
        generation: later than the one that this process was told to `hold` (0 before any was).
        members: names of the processes of this part, for display.
        minority: the members are too few for a quorum: waits `grace_s` before it asks.
        grace_s: in seconds.

    Returns:
        False if the part must not continue: others have followed the generation that it held, or
        the attempt is over or was replaced.

    Raises:
        PeerLost, DeadlineExceeded: the server cannot be reached, or did not answer. The part must
            not continue, but may ask again.
        TaskError: outside a task (see `in_task`), or the server has no such task.
        ConfigError: a generation below 1, or no members.
    """
    here = task()
    if not here.id or "FIREFLYER_TASK_DIR" not in os.environ:
        raise TaskError("a lease exists only inside a task of the platform; use a quorum instead")
    if minority:
        time.sleep(grace_s)
    me = _me()
    wanted = Lease(generation=generation, members=tuple(members), token=me.token)
    home = here.directory.parents[1]  # <home>/tasks/<id>
    asked = LeaseRequest(attempt=here.attempt, held=me.held, lease=wanted)
    return Client(home).lease(here.id, asked)
