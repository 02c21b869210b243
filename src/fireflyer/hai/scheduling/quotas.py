"""Rows of quotas as people set them, and which of them counts. Pure."""

from collections.abc import Iterable, Mapping

from fireflyer.hai.identity import Quota as Row
from fireflyer.hai.model import PRIORITIES
from fireflyer.hai.scheduling.jobs import ANY, Quota
from fireflyer.hai.scheduling.lanes import QuotaKey


def limits(rows: Iterable[Row]) -> dict[QuotaKey, Quota]:
    """The limits of a cluster. A row without a user or group holds for each of those without a row of their
    own; one without a priority for each priority that the same user and group have none for."""
    found: dict[QuotaKey, Quota] = {}
    for row in sorted(rows, key=lambda row: row.priority != ""):
        levels = [PRIORITIES[row.priority]] if row.priority else list(PRIORITIES.values())
        for level in levels:
            found[row.user or ANY, level, row.group or ANY] = Quota(row.nodes, row.gpus)
    return found


def counting(among: Mapping[QuotaKey, Quota], user: str, priority: int, group: str) -> Quota | None:
    """The limit that counts: the most particular one, by user, then by group. None: there is none."""
    for who in (user, ANY):
        for where in (group, ANY):
            found = among.get((who, priority, where))
            if found is not None:
                return found
    return None
