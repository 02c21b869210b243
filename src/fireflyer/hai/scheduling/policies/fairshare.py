"""Fair share: who has had least of the cluster lately comes first; what runs is left alone."""

from fireflyer.hai.scheduling.accounts import Scale
from fireflyer.hai.scheduling.policies.base import Behind, Policy


class FairShare(Policy, frozen=True, kw_only=True):
    """Users in the order of their GPU time, forgotten by half a week, in steps of half a power of two; EASY
    backfill behind the first that does not fit. What Slurm's multifactor priority does with equal shares."""

    behind: Behind = "backfill"
    scale: Scale | None = Scale(unit=3600.0, ratio=2**0.5, half_life_s=7 * 86_400.0)
