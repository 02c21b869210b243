"""Least attained service first, discretised: a job's level grows with the logarithm of its GPU time."""

from typing import Literal

from fireflyer.hai.scheduling.accounts import Scale
from fireflyer.hai.scheduling.policies.base import Behind, Policy


class LeastAttained(Policy, frozen=True, kw_only=True):
    """After Tiresias (NSDI'19): level = floor(log2 of the GPU-hours) + 1; lower preempt higher at once."""

    behind: Behind = "anything"
    preemptive: bool = True
    scale: Scale | None = Scale(unit=3600.0)
    by: Literal["user", "job"] = "job"
    patience_s: float = 24 * 3600.0
