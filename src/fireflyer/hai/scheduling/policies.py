"""Scheduling policies by name. A policy is a set of parameters, which `planner.py` applies."""

import math
from typing import Literal

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.hai.scheduling.accounts import Scale
from fireflyer.hai.scheduling.jobs import Job

Behind = Literal["nothing", "backfill", "anything"]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters in which policies differ. All policies order jobs by higher priority, then lower
    level of attained service (`accounts.py`), then submission. All ranks of a gang start
    together."""

    behind: Behind = "nothing"
    """Later jobs that may start while an earlier job does not fit. nothing: only jobs that cannot
    use the same nodes; backfill: only jobs that do not delay the earlier job (EASY); anything: all
    jobs that fit."""
    preemptive: bool = False
    """True if jobs of higher priority, or of a lower level, preempt running jobs."""
    spares_own: bool = False
    """True if a job never preempts a job of the same user and priority."""
    scale: Scale | None = None
    """Conversion of service to levels; None: all jobs are at level 0."""
    by: Literal["user", "job"] = "user"
    """Owner of the account that determines the level."""
    wait_s: float = 0.0
    """Seconds that a job waits before it preempts jobs of its own priority."""
    repack_after_s: float = math.inf
    """Seconds that a job waits before other jobs move for it (`repack.py`): jobs on one node whose
    quantum is over move to free GPUs on other nodes. Only for preemptive policies."""
    patience_s: float = math.inf
    """Seconds after which a waiting job is overdue. An overdue job comes before all levels of its
    priority, may preempt every level, and gets a reservation."""

    def quantum_s(self, job: Job) -> float:
        """Returns the quantum of a job: the seconds after its launch during which jobs of the same
        priority may not preempt the job."""
        del job
        return 0.0


class Fifo(Policy, frozen=True, kw_only=True):
    """Order of the public HAI Platform (`scheduler/` of hai-platform): no backfill, no
    preemption."""


class Backfill(Policy, frozen=True, kw_only=True):
    """EASY backfill (Lifka 1995). The first job that does not fit gets a reservation of nodes and a
    start time, from the estimates of the running jobs. Later jobs start on other nodes, or end
    before that time by their own estimates. If too few estimates are known for a start time, later
    jobs start only on nodes that are too small for the first job."""

    behind: Behind = "backfill"


class FairShare(Policy, frozen=True, kw_only=True):
    """Fair share: jobs in the order of their users' GPU time. GPU time decays with a half-life of a
    week, and is divided into levels whose thresholds grow by a factor of sqrt(2). EASY backfill
    applies behind the first job that does not fit. Slurm's multifactor priority with equal shares
    behaves similarly."""

    behind: Behind = "backfill"
    scale: Scale | None = Scale(unit=3600.0, ratio=2**0.5, half_life_s=7 * 86_400.0)


class LeastAttained(Policy, frozen=True, kw_only=True):
    """Least attained service, after Tiresias (NSDI'19): level = floor(log2 of the GPU-hours) + 1.
    Lower levels preempt higher levels immediately."""

    behind: Behind = "anything"
    preemptive: bool = True
    scale: Scale | None = Scale(unit=3600.0)
    by: Literal["user", "job"] = "job"
    patience_s: float = 24 * 3600.0


UNMEASURED_S = 60.0
"""Seconds assumed for a suspend and a restart together, until both are measured."""


class TimeShare(Policy, frozen=True, kw_only=True):
    """Time sharing of the cluster (Fire-Flyer paper, on scheduling). Users with little recent
    service preempt users with much service. Each level needs four times the service of the level
    below, so preemptions of long work become rare. A job's quantum begins at its launch. The
    quantum lasts `shortest_s` seconds, or `worth` times the cost of a preemption if that is longer.
    During the quantum, jobs of the same priority do not preempt the job."""

    behind: Behind = "anything"
    preemptive: bool = True
    spares_own: bool = True
    scale: Scale | None = Scale(unit=3600.0, ratio=4.0, half_life_s=14 * 86_400.0)
    wait_s: float = 1200.0
    repack_after_s: float = 6 * 3600.0
    patience_s: float = 48 * 3600.0
    shortest_s: float = 1800.0
    worth: float = 20.0
    """Minimum ratio of the time between a launch and a preemption to the cost of a preemption."""

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
        ConfigError: no such policy.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}: expected one of {', '.join(POLICIES)}")
    return POLICIES[name]
