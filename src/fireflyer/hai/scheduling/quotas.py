"""Quota rows as users set them, and the choice of the row in force. Pure."""

from collections.abc import Iterable, Mapping

from fireflyer.hai.model import PRIORITIES
from fireflyer.hai.model.identity import Quota as Row
from fireflyer.hai.scheduling.jobs import ANY, Quota
from fireflyer.hai.scheduling.lanes import QuotaKey


def limits(rows: Iterable[Row]) -> dict[QuotaKey, Quota]:
    """Returns the limits of a cluster. A row without a user or group applies to all users or groups
    without a row of their own. A row without a priority applies to each priority for which the same
    user and group have no row."""
    found: dict[QuotaKey, Quota] = {}
    for row in sorted(rows, key=lambda row: row.priority != ""):
        levels = [PRIORITIES[row.priority]] if row.priority else list(PRIORITIES.values())
        for level in levels:
            found[row.user or ANY, level, row.group or ANY] = Quota(row.nodes, row.gpus)
    return found


def counting(among: Mapping[QuotaKey, Quota], user: str, priority: int, group: str) -> Quota | None:
    """Returns the limit in force: the most specific limit, by user, then by group. None: no
    limit."""
    for who in (user, ANY):
        for where in (group, ANY):
            found = among.get((who, priority, where))
            if found is not None:
                return found
    return None
