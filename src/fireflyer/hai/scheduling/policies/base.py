"""What a policy decides."""

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from fireflyer.hai.scheduling.accounts import Scale

if TYPE_CHECKING:
    from fireflyer.hai.scheduling.cluster import Job

Behind = Literal["nothing", "backfill", "anything"]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The rules that policies differ in. All of them: higher priority first, then lower level, then order of
    submission; gangs start as a whole."""

    behind: Behind = "nothing"
    """What may start behind a job that does not fit: nothing that could use the same nodes; what does not
    delay it (EASY backfill); or anything that fits."""
    preemptive: bool = False
    """Jobs that run are asked to make room for higher priority, and for lower levels."""
    spares_own: bool = False
    """Never preempts a job of the same user and priority."""
    scale: Scale | None = None
    """None: all jobs are at level 0."""
    by: Literal["user", "job"] = "user"
    """Whose account counts."""
    wait_s: float = 0.0
    """So long a job waits for others to end by themselves before it interrupts any of its own priority."""
    repack_after_s: float = math.inf
    """So long a job waits before others move for it: those on one node that have had their quantum go to GPUs
    that are free elsewhere (`repacking.py`). Of preemptive policies."""
    patience_s: float = math.inf
    """A job that waits longer is overdue: it comes before all levels of its priority, any level makes room
    for it, and nodes are kept free for it."""

    def quantum_s(self, job: "Job") -> float:
        """For how long after its launch a job is left alone by jobs of its priority."""
        del job
        return 0.0
