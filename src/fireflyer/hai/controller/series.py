"""Selection of series over time for charts."""

from math import isnan

from fireflyer.errors import ConfigError
from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.database.samples import Samples
from fireflyer.hai.model import SeriesView
from fireflyer.hai.model.admission import MAX_NAME, check_line
from fireflyer.hai.model.identity import Identity
from fireflyer.hai.sampling.series import EMPTY, LEVELS, METRICS, Point, choose_level, mean, thin

MOST_POINTS = 500


def check_scope(controller: Controller, scope: str, who: Identity) -> None:
    """Rejects a scope that does not exist or that the reader may not see.

    Raises:
        ConfigError: the text is not a scope, or names another user.
        NoSuchTask: the reader has no such task.
    """
    check_line("the scope", scope, MAX_NAME)
    kind, _, name = scope.partition(":")
    if scope == "cluster" or (kind == "node" and name):
        return
    if kind in ("task", "rank") and name:
        task = name.partition("/")[0]
        controller.view(task)
        controller.check_owner(task, who.only)
    elif kind != "user" or not name or who.only not in (None, name):
        raise ConfigError(
            f"invalid scope {scope!r}: expected cluster, node:NAME, task:ID, rank:ID/RANK, or "
            "user:NAME with your own name"
        )


def select(samples: Samples, scope: str, seconds: float, until: float) -> SeriesView:
    """Returns the series of a scope over the last `seconds` before `until`. A level is the length
    of an interval. Uses the shortest level, from `choose_level(seconds)` on, that still has points
    of that time. If no level has points, uses `choose_level(seconds)`."""
    fit = [level for level in LEVELS if level >= choose_level(seconds)]
    for level in (*fit, fit[0]):
        begin, points = samples.read(scope, level, until - seconds, until)
        _complete(samples, scope, level, begin, points)
        if not all(isnan(value) for each in points for value in each):
            break
    points, size = thin(points, MOST_POINTS)
    metrics: dict[str, list[float | None]] = {}
    for name, column in zip(METRICS, zip(*points, strict=True), strict=True):
        if not all(map(isnan, column)):
            metrics[name] = [None if isnan(value) else value for value in column]
    return SeriesView(scope=scope, begin=begin, step_s=level * size, metrics=metrics)


def _complete(samples: Samples, scope: str, level: int, begin: int, points: list[Point]) -> None:
    """Fills the newest two intervals, which may not have ended, with the means of their minutes so
    far."""
    for at in range(max(0, len(points) - 2), len(points)):
        if level > LEVELS[0] and points[at] is EMPTY:
            since = begin + at * level
            points[at] = mean(samples.read(scope, LEVELS[0], since, since + level - 1)[1])
