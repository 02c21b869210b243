"""The lease of an attempt, as a rank asks for it: of the parts of a network that was cut one goes on.

An attempt begins at generation 0 with all its ranks. When its members change, the first of the new ones
asks for the next generation; the server grants each generation once, to whoever asks first.
"""

import os
import secrets
import time
from collections.abc import Collection

from fireflyer.errors import TaskError
from fireflyer.hai.client import Client
from fireflyer.hai.model import Lease, LeaseRequest
from fireflyer.hai.rank import task

GRACE_S = 6.0
"""How long a part with less than half of the ranks lets a larger one ask first: longer than HFReduce waits
for members that do not answer (5 s)."""

_tokens: dict[int, str] = {}
"""By process id: a forked child is another asker."""


def in_task() -> bool:
    """Whether this process is a rank of a task. If not, nobody grants leases: go by a quorum."""
    return bool(task().id)


def lease(
    generation: int,
    ranks: Collection[int],
    minority: bool = False,
    *,
    token: str | None = None,
    grace_s: float = GRACE_S,
) -> bool:
    """Asks the server that this part of the attempt alone goes on. One of its ranks calls it.

    Granted once a generation, to the first that asks. The same question again (attempt, generation, ranks and
    token alike) is granted again, so whoever lost the answer may repeat it.

    Args:
        generation: the one after that which this part holds; an attempt begins with 0.
        ranks: its members, by their RANK.
        minority: it has less than half of the ranks of the generation before: waits `grace_s` before it asks.
        token: names the part; default one of this process, so only the same process can repeat a question.
        grace_s: in seconds.

    Returns:
        False where the part must not go on: the generation was granted to others or does not follow the one
        in force, or the attempt is over or was replaced.

    Raises:
        PeerLost, DeadlineExceeded: the server cannot be reached, or did not answer. The part must not go on,
            but may ask again.
        TaskError: outside a task (see `in_task`), or the server has no such task.
        ConfigError: a generation, rank or token that cannot be.
    """
    me = task()
    if not me.id or "FIREFLYER_TASK_DIR" not in os.environ:
        raise TaskError("a lease was asked for outside a task: nobody grants one; go by a quorum")
    if minority:
        time.sleep(grace_s)
    mine = token or _tokens.setdefault(os.getpid(), secrets.token_hex(8))
    wanted = Lease(generation=generation, ranks=tuple(sorted(ranks)), token=mine)
    home = me.directory.parents[1]  # <home>/tasks/<id>
    return Client(home).lease(me.id, LeaseRequest(attempt=me.attempt, lease=wanted))
