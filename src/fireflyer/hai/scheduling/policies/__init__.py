"""Scheduling policies by name. A policy is a handful of decisions; `planner.py` carries them out."""

from fireflyer.errors import ConfigError
from fireflyer.hai.scheduling.policies.backfill import Backfill
from fireflyer.hai.scheduling.policies.base import Policy
from fireflyer.hai.scheduling.policies.fairshare import FairShare
from fireflyer.hai.scheduling.policies.fifo import Fifo
from fireflyer.hai.scheduling.policies.las import LeastAttained
from fireflyer.hai.scheduling.policies.timeshare import FixedQuantum, TimeShare

__all__ = ["DEFAULT", "POLICIES", "Policy", "policy_named"]

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
    """The policy of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in POLICIES:
        raise ConfigError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]
