"""Requests for the lease of an attempt: after a network partition, one part of the ranks continues.

An attempt begins at generation 0 with all its ranks. When its members change, the first of the new
members requests a later generation. The server grants one successor of each generation, to the
first part that requests it.
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
"""Seconds that a part without a quorum waits, so that a larger part can request the lease first."""


_AGAIN_S = 0.2
"""Seconds between two requests while the server does not answer."""


class _LeaseRenewer(msgspec.Struct):
    token: str
    held: int = 0


_askers: dict[int, _LeaseRenewer] = {}
"""Lease state by process id, so that a forked child requests with its own token."""


def _me() -> _LeaseRenewer:
    return _askers.setdefault(os.getpid(), _LeaseRenewer(secrets.token_hex(8)))


def in_task() -> bool:
    """Returns whether this process is a rank of a task. Outside a task no server grants leases, so
    use a quorum."""
    return bool(task().id)


def hold(generation: int) -> None:
    """Records a newly formed generation, from which this process's next `lease` starts. Every
    member calls this function. Also reports a newcomer as a member."""
    _me().held = generation
    joined()


def _ask_until_answered(
    patience_s: float, generation: int, members: Sequence[str], minority: bool
) -> bool:
    """Calls `lease` until the server answers or `patience_s` is over, because a stopped server may
    return or be replaced."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return lease(generation, members, minority)
        except (PeerLost, DeadlineExceeded, Corrupted):  # a starting server has no address yet
            if time.monotonic() >= deadline:
                raise
        minority = False  # `lease` has already waited for the larger part
        time.sleep(_AGAIN_S)


class Steps(Protocol):
    """Runner of the steps of an elastic job: `model.elastic` of HaiScale."""

    permit: Callable[[int, tuple[str, ...], bool], bool] | None
    """(generation, members, minority) -> whether this part may continue."""
    fenced: list[Callable[[int], None]]
    """Callbacks for each new generation, called once the generation is formed."""
    begun: list[Callable[[int, int], None]]
    """Callbacks at the start of each step, with the generation and the number of steps begun
    in it."""


def elastic(steps: Steps, *, patience_s: float = 60.0) -> None:
    """Connects an elastic job to its task. The lease decides which part of the ranks continues, and
    the platform learns the members. `suspend_requested()` then returns the same on all members in
    each step. Call this function on every rank before the first step. Outside a task it has no
    effect, and a quorum decides which part continues.

    Args:
        steps: runner of the job's steps.
        patience_s: maximum seconds that the remaining members wait for a server that does not
            answer.
    """
    if in_task():
        steps.permit = partial(_ask_until_answered, patience_s)
        steps.fenced[:0] = [hold, lambda _: between()]
        steps.begun.append(begun)


def lease(
    generation: int, members: Sequence[str], minority: bool = False, *, grace_s: float = GRACE_S
) -> bool:
    """Requests the lease, so that only this part of the attempt continues. The first member of the
    part calls this function.

    The server grants the first request that starts from the current generation. The server
    grants the same request from the same process again, so a process that lost the answer may
    repeat the request.

    Args:
        generation: number above the generation that this process last passed to `hold` (initially
            0).
        members: names of the processes of this part, for display.
        minority: True if the members are too few for a quorum; the function then first waits
            `grace_s`.
        grace_s: wait of a minority, in seconds.

    Returns:
        True if the part may continue. False if another part has been granted a later generation, or
        if the attempt is over or was replaced.

    Raises:
        PeerLost, DeadlineExceeded: the server cannot be reached, or did not answer. The part must
            not continue, but may call this function again.
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
