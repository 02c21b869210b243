"""Time sharing: multi-level feedback between users, with quanta that each job's own costs set."""

from typing import TYPE_CHECKING

from fireflyer.hai.scheduling.accounts import Scale
from fireflyer.hai.scheduling.policies.base import Behind, Policy

if TYPE_CHECKING:
    from fireflyer.hai.scheduling.cluster import Job

UNMEASURED_S = 60.0
"""What a suspend and the way back are taken to cost together before they were measured."""


class TimeShare(Policy, frozen=True, kw_only=True):
    """The cluster is shared by time (paper, section on the HAI Platform): users who have had little lately
    interrupt those who have had much, each time four times as much, so that interruptions become rare
    for long work. A job is left alone until it has worked `worth` times what an interruption costs it."""

    behind: Behind = "anything"
    preemptive: bool = True
    spares_own: bool = True
    scale: Scale | None = Scale(unit=3600.0, ratio=4.0, half_life_s=14 * 86_400.0)
    wait_s: float = 1200.0
    repack_after_s: float = 6 * 3600.0
    patience_s: float = 48 * 3600.0
    shortest_s: float = 1800.0
    worth: float = 20.0
    """An interruption costs at most one part in so many of what runs between two of them."""

    def quantum_s(self, job: "Job") -> float:
        known = (job.checkpoint_s, job.restart_s)
        cost = UNMEASURED_S if None in known else sum(each or 0.0 for each in known)
        return max(self.shortest_s, self.worth * cost)


class FixedQuantum(Policy, frozen=True, kw_only=True):
    """What TimeShare is measured against: round robin by attained time with one quantum for all."""

    behind: Behind = "anything"
    preemptive: bool = True
    spares_own: bool = True
    scale: Scale | None = Scale(unit=600.0, ratio=1.3)
    patience_s: float = 12 * 3600.0
    fixed_s: float = 1800.0

    def quantum_s(self, job: "Job") -> float:
        del job
        return self.fixed_s
