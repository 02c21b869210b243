"""Scheduling policies by name. A policy is a handful of decisions; `planner.py` carries them out."""

import math
from typing import Literal

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.hai.scheduling.accounts import Scale
from fireflyer.hai.scheduling.jobs import Job

Behind = Literal["nothing", "backfill", "anything"]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Rules in which policies differ. All policies put higher priority first, then lower level,
    then order of submission; gangs start as a whole."""

    behind: Behind = "nothing"
    """Jobs that may start behind a job that does not fit: none that could use the same nodes; those
    that do not delay it (EASY backfill); or any that fit."""
    preemptive: bool = False
    """True if running jobs are asked to make room for higher priority, and for lower levels."""
    spares_own: bool = False
    """True if a job never preempts a job of the same user and priority."""
    scale: Scale | None = None
    """None: all jobs are at level 0."""
    by: Literal["user", "job"] = "user"
    """Owner of the account that determines the level."""
    wait_s: float = 0.0
    """Time that a job waits for others to end by themselves before it interrupts any of its own
    priority."""
    repack_after_s: float = math.inf
    """Time that a job waits before others move for it. Jobs on one node that have had their quantum
    move to GPUs that are free elsewhere (`repack.py`). For preemptive policies."""
    patience_s: float = math.inf
    """Wait after which a job is overdue: it comes before all levels of its priority, any level
    makes room for it, and nodes are kept free for it."""

    def quantum_s(self, job: Job) -> float:
        """Returns how long after its launch a job is left alone by jobs of its priority."""
        del job
        return 0.0


class Fifo(Policy, frozen=True, kw_only=True):
    """Order of the public HAI Platform (`scheduler/` of hai-platform): no backfill, no
    preemption."""


class Backfill(Policy, frozen=True, kw_only=True):
    """EASY (Lifka 1995): the first job that does not fit gets a reservation of nodes and a start
    time, by the estimates of the jobs running there. Later jobs start on other nodes, or end before
    that time by their own estimate. If an end that matters is not known, no job passes."""

    behind: Behind = "backfill"


class FairShare(Policy, frozen=True, kw_only=True):
    """Users in the order of their GPU time, with a half-life of a week, in steps of half a power of
    two. EASY backfill applies behind the first job that does not fit. Slurm's multifactor priority
    with equal shares behaves alike."""

    behind: Behind = "backfill"
    scale: Scale | None = Scale(unit=3600.0, ratio=2**0.5, half_life_s=7 * 86_400.0)


class LeastAttained(Policy, frozen=True, kw_only=True):
    """Policy after Tiresias (NSDI'19): level = floor(log2 of the GPU-hours) + 1; lower levels
    preempt higher ones at once."""

    behind: Behind = "anything"
    preemptive: bool = True
    scale: Scale | None = Scale(unit=3600.0)
    by: Literal["user", "job"] = "job"
    patience_s: float = 24 * 3600.0


UNMEASURED_S = 60.0
"""Assumed cost of a suspend and a restart together, before both are measured."""


class TimeShare(Policy, frozen=True, kw_only=True):
    """Time sharing of the cluster (paper, section on the HAI Platform). Users with little recent
    service interrupt users with much. Each turn is four times as long as the one before, so
    interruptions become rare for long work. A job is left alone until it has worked `worth` times
    the cost of interrupting it."""

    behind: Behind = "anything"
    preemptive: bool = True
    spares_own: bool = True
    scale: Scale | None = Scale(unit=3600.0, ratio=4.0, half_life_s=14 * 86_400.0)
    wait_s: float = 1200.0
    repack_after_s: float = 6 * 3600.0
    patience_s: float = 48 * 3600.0
    shortest_s: float = 1800.0
    worth: float = 20.0
    """Minimum ratio of the work between two interruptions to the cost of one."""

    def quantum_s(self, job: Job) -> float:
        known = (job.checkpoint_s, job.restart_s)
        cost = UNMEASURED_S if None in known else sum(each or 0.0 for each in known)
        return max(self.shortest_s, self.worth * cost)


class FixedQuantum(Policy, frozen=True, kw_only=True):
    """Baseline for TimeShare: round robin by attained time with one quantum for all jobs."""

    behind: Behind = "anything"
    preemptive: bool = True
    spares_own: bool = True
    scale: Scale | None = Scale(unit=600.0, ratio=1.3)
    patience_s: float = 12 * 3600.0
    fixed_s: float = 1800.0

    def quantum_s(self, job: Job) -> float:
        del job
        return self.fixed_s


DEFAULT = "timeshare"

POLICIES: dict[str, Policy] = {
    "timeshare": TimeShare(),
    "timeshare-fixed": FixedQuantum(),
    "fifo": Fifo(),
    "fifo-backfill": Backfill(),
    "las": LeastAttained(),
    "fairshare": FairShare(),
}


def policy_named(name: str) -> Policy:
    """Returns the policy of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}: expected one of {', '.join(POLICIES)}")
    return POLICIES[name]
