"""First in, first out by submission: the first job that does not fit holds back all later ones."""

from fireflyer.hai.scheduling.policies.base import Policy


class Fifo(Policy, frozen=True, kw_only=True):
    """The public HAI Platform's order (`scheduler/` of hai-platform): no backfill, no preemption."""
