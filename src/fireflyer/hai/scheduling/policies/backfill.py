"""First in, first out, with EASY backfill: later jobs may pass if the first that waits is not delayed."""

from fireflyer.hai.scheduling.policies.base import Behind, Policy


class Backfill(Policy, frozen=True, kw_only=True):
    """EASY (Lifka 1995): the first job that does not fit gets nodes and a moment reserved by the estimates of
    what runs there. Later ones start on other nodes, or end before that moment by their own estimate.
    Where an end that counts is not known, nothing passes."""

    behind: Behind = "backfill"
