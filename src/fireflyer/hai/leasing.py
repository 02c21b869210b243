"""The lease of an attempt, as a rank asks for it: of the parts of a network that was cut one goes on.

An attempt begins at generation 0 with all its ranks. When its members change, the first of the new ones
asks for a later generation; the server lets each generation be followed once, by whoever asks first.
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
"""How long a part that is too small for a quorum lets a larger one ask first."""


_AGAIN_S = 0.2
"""Between two questions to a server that is away."""


class _Asker(msgspec.Struct):
    token: str
    held: int = 0


_askers: dict[int, _Asker] = {}
"""By process id: a forked child is another asker."""


def _me() -> _Asker:
    return _askers.setdefault(os.getpid(), _Asker(secrets.token_hex(8)))


def in_task() -> bool:
    """Whether this process is a rank of a task. If not, nobody grants leases: go by a quorum."""
    return bool(task().id)


def hold(generation: int) -> None:
    """Every member tells so once a generation is formed: its next `lease` follows this one. Makes a newcomer
    known as a member."""
    _me().held = generation
    joined()


def _ask_until_answered(
    patience_s: float, generation: int, members: Sequence[str], minority: bool
) -> bool:
    """`lease`, repeated while the server is away: it is taken up again, or another one comes."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return lease(generation, members, minority)
        except (PeerLost, DeadlineExceeded, Corrupted):  # one that starts has not said where it is
            if time.monotonic() >= deadline:
                raise
        minority = False  # it has waited for others already
        time.sleep(_AGAIN_S)


class Steps(Protocol):
    """What runs the steps of an elastic job: `model.elastic` of HaiScale."""

    permit: Callable[[int, tuple[str, ...], bool], bool] | None
    """(generation, members, minority) -> whether these may go on."""
    fenced: list[Callable[[int], None]]
    """Called with a new generation once it is formed."""
    begun: list[Callable[[int, int], None]]
    """Called at the begin of each step with the generation and the number of steps begun in it."""


def elastic(steps: Steps, *, patience_s: float = 60.0) -> None:
    """Runs an elastic job as a task: one part of it goes on, by the lease; the platform knows who is a
    member; `suspend_requested()` answers alike on all members, by step. Call it on every rank before the
    first step. Does nothing outside a task, where a quorum decides who goes on.

    Args:
        steps: of the job.
        patience_s: how long members that have lost others wait for the server, in seconds, if it is away.
    """
    if in_task():
        steps.permit = partial(_ask_until_answered, patience_s)
        steps.fenced[:0] = [hold, lambda _: between()]
        steps.begun.append(begun)


def lease(
    generation: int, members: Sequence[str], minority: bool = False, *, grace_s: float = GRACE_S
) -> bool:
    """Asks the server that this part of the attempt alone goes on. The first of its members calls it.

    Granted to the first that asks from the generation in force. The same question again from the same process
    is granted again, so whoever lost the answer may repeat it.

    Args:
        generation: later than the one that this process was told to `hold` (0 before any was).
        members: names of the processes of this part, for people.
        minority: they are too few for a quorum: waits `grace_s` before it asks.
        grace_s: in seconds.

    Returns:
        False where the part must not go on: others have followed the generation that it held, or the attempt
        is over or was replaced.

    Raises:
        PeerLost, DeadlineExceeded: the server cannot be reached, or did not answer. The part must not go on,
            but may ask again.
        TaskError: outside a task (see `in_task`), or the server has no such task.
        ConfigError: a generation below 1, or no members.
    """
    here = task()
    if not here.id or "FIREFLYER_TASK_DIR" not in os.environ:
        raise TaskError("a lease was asked for outside a task: nobody grants one; go by a quorum")
    if minority:
        time.sleep(grace_s)
    me = _me()
    wanted = Lease(generation=generation, members=tuple(members), token=me.token)
    home = here.directory.parents[1]  # <home>/tasks/<id>
    asked = LeaseRequest(attempt=here.attempt, held=me.held, lease=wanted)
    return Client(home).lease(here.id, asked)
