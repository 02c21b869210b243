"""Time series in the database: chunks of points by scope and level (`sampling/series.py`). A level
is the number of seconds between points.

A scope is "cluster", "node:n0", "user:ada", "task:t7" or "rank:t7/0".
"""

from collections.abc import Mapping
from itertools import pairwise
from math import isnan
from typing import Any

import sqlalchemy as sa

from fireflyer.hai.database.connection import Database
from fireflyer.hai.database.schema import sample as _sample
from fireflyer.hai.sampling.series import (
    EMPTY,
    KEPT_S,
    LEVELS,
    POINTS,
    Point,
    chunk_begin,
    mean,
    pack,
    place,
    unpack,
)


class Samples:
    """Series of one server; used by the thread of its database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last: dict[int, int] = {}
        """Interval of the last point, by level; empty until the first point."""

    def add(self, when: float, points: Mapping[str, Point]) -> None:
        """Adds the points of one minute, by scope. If an interval of a coarser level has ended
        since the last call, also stores the mean of that interval. Drops old chunks once an
        hour."""
        self._put(LEVELS[0], when, points)
        for lower, level in pairwise(LEVELS):
            current, before = int(when // level), self._last.get(level)
            self._last[level] = current
            if before == current:
                continue
            ended = self._unfinished(lower, level, when) if before is None else [before]
            for interval in ended:
                self._put(level, interval * level, self._means(lower, interval * level, level))
            if level == LEVELS[-1]:
                self._drop(when)

    def _unfinished(self, lower: int, level: int, when: float) -> list[int]:
        """Returns the intervals of `level` that have ended in the two newest chunks of `lower`. An
        earlier server may have died before it stored the means of these intervals."""
        query = sa.select(_sample.c.begin).where(_sample.c.level == lower).distinct()
        query = query.order_by(_sample.c.begin.desc()).limit(2)
        with self._database.reading() as connection:
            begins = sorted(connection.execute(query).scalars())
        per_chunk = lower * POINTS // level
        found = [begin // level + at for begin in begins for at in range(per_chunk)]
        return [interval for interval in found if interval < when // level]

    def _put(self, level: int, when: float, points: Mapping[str, Point]) -> None:
        begin, at = chunk_begin(when, level), place(when, level)
        there = (_sample.c.level == level) & (_sample.c.begin == begin)
        with self._database.writing() as connection:
            query = sa.select(_sample.c.scope, _sample.c.data).where(there)
            known = {row.scope: row.data for row in connection.execute(query)}
            fresh: list[dict[str, Any]] = []
            changed: list[dict[str, Any]] = []
            for scope, point in points.items():
                data = known.get(scope)
                chunk = [EMPTY] * POINTS if data is None else unpack(data)
                chunk[at] = point
                row = {"scope": scope, "level": level, "begin": begin, "data": pack(chunk)}
                (fresh if data is None else changed).append(row)
            if fresh:
                connection.execute(_sample.insert(), fresh)
            if changed:
                at_row = there & (_sample.c.scope == sa.bindparam("at"))
                update = _sample.update().where(at_row).values(data=sa.bindparam("to"))
                connection.execute(update, [{"at": r["scope"], "to": r["data"]} for r in changed])

    def _means(self, lower: int, begin: float, length: int) -> dict[str, Point]:
        """Returns, for each scope, the mean of its points at level `lower` in an interval. All
        these points lie in one chunk."""
        there = (_sample.c.level == lower) & (_sample.c.begin == chunk_begin(begin, lower))
        first = place(begin, lower)
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(_sample.c.scope, _sample.c.data).where(there)).all()
        found = {row.scope: mean(unpack(row.data)[first : first + length // lower]) for row in rows}
        return {scope: point for scope, point in found.items() if not all(map(isnan, point))}

    def _drop(self, now: float) -> None:
        with self._database.writing() as connection:
            for level, kept in KEPT_S.items():
                old = (_sample.c.level == level) & (_sample.c.begin < now - kept - level * POINTS)
                connection.execute(_sample.delete().where(old))

    def read(self, scope: str, level: int, since: float, until: float) -> tuple[int, list[Point]]:
        """Returns the time of the first point, in seconds since 1970, and the points of a scope at
        a level. Missing points are EMPTY."""
        first = int(since // level) * level
        count = max(0, int(until // level) - first // level + 1)
        found = [EMPTY] * count
        there = (_sample.c.scope == scope) & (_sample.c.level == level)
        there &= (_sample.c.begin >= chunk_begin(since, level)) & (_sample.c.begin <= until)
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(_sample.c.begin, _sample.c.data).where(there)).all()
        for row in rows:
            offset = (row.begin - first) // level
            for at, point in enumerate(unpack(row.data), start=offset):
                if 0 <= at < count:
                    found[at] = point
        return first, found
