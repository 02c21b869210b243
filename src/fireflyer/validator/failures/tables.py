"""Tables of a site's failures in the form of the paper's VI, VII and VIII. Pure."""

import datetime
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fireflyer.validator.failures.records import Failure, Source, class_of_xid

Table = dict[str, Any]


def month_of(when: float) -> str:
    """Returns the month of a time as YYYY-MM, UTC."""
    return datetime.datetime.fromtimestamp(when, datetime.UTC).strftime("%Y-%m")


def day_of(when: float) -> str:
    """Returns the day of a time as YYYY-MM-DD, UTC."""
    return datetime.datetime.fromtimestamp(when, datetime.UTC).strftime("%Y-%m-%d")


def percent(part: int, whole: int) -> float:
    """Returns a percentage, with the two decimals of the paper."""
    return round(100 * part / whole, 2) if whole else 0.0


def xid_table(sources: Iterable[Source]) -> Table | None:
    """Counts Xid errors by code (Table VI); None without such errors.

    Monthly counts are left out, because Table VII counts failures and Table VI counts log messages.
    """
    counts: Counter[int] = Counter()
    classes: dict[int, str] = {}
    for source in sources:
        for failure in source.failures:
            if failure.xid is not None and failure.period in ("moment", "year"):
                counts[failure.xid] += failure.count
                classes[failure.xid] = failure.of
    if not counts:
        return None
    total = sum(counts.values())
    of_class: Counter[str] = Counter()
    for code, count in counts.items():
        of_class[classes[code]] += count
    return {
        "rows": [
            {"xid": code, "count": count, "percent": percent(count, total), "class": classes[code]}
            for code, count in sorted(counts.items())
        ],
        "classes": {
            of: {"count": count, "percent": percent(count, total)}
            for of, count in of_class.most_common()
        },
        "total": total,
    }


def month_table(sources: Iterable[Source]) -> Table | None:
    """Counts hardware failures by month (Table VII); None without failures.

    Each class has a column, and so has each Xid code. Software and NVLink errors are left out, as
    in the paper.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for source in sources:
        for failure in source.failures:
            if failure.period in ("moment", "month") and failure.of not in ("software", "nvlink"):
                counts[month_of(failure.when), column(failure)] += failure.count
    if not counts:
        return None
    months = sorted({month for month, _ in counts})
    columns = sorted({name for _, name in counts}, key=_order)
    sums = {name: sum(counts[month, name] for month in months) for name in columns}
    total = sum(sums.values())
    return {
        "columns": columns,
        "rows": [
            {"month": month, **{name: counts[month, name] for name in columns},
             "total": sum(counts[month, name] for name in columns)}
            for month in months
        ],
        "sums": {**sums, "total": total},
        "percent": {name: percent(count, total) for name, count in sums.items()},
    }  # fmt: skip


def column(failure: Failure) -> str:
    """Returns the column of a failure in Table VII."""
    return failure.of if failure.xid is None else f"xid{failure.xid}"


def _order(name: str) -> tuple[int, int, str]:
    code = name.removeprefix("xid")
    return (1, int(code), name) if name.startswith("xid") and code.isdecimal() else (0, 0, name)


def day_table(sources: Iterable[Source], of: str) -> Table | None:
    """Counts failures of one class by day (Table VIII: network); None without failures."""
    counts: Counter[str] = Counter()
    listed: set[str] = set()
    for source in sources:
        listed.update(source.days)
        for failure in source.failures:
            if failure.of == of and failure.period in ("moment", "day"):
                counts[day_of(failure.when)] += failure.count
    if not counts:
        return None
    months: Counter[str] = Counter()
    for day, count in counts.items():
        months[day[:7]] += count
    return {
        "rows": [{"date": day, "events": counts[day]} for day in sorted(listed | counts.keys())],
        "months": dict(sorted(months.items())),
        "total": sum(counts.values()),
        "worst": [
            {"date": day, "events": count}
            for day, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:5]
        ],
    }


def span(table: Table) -> int:
    """Returns the number of days from a day table's first date to its last, both included."""
    days = [datetime.date.fromisoformat(row["date"]) for row in table["rows"]]
    return (days[-1] - days[0]).days + 1


def daily(table: Table, days: int) -> list[int]:
    """Returns the count of each of `days` days, beginning with the table's first date."""
    counts = {row["date"]: row["events"] for row in table["rows"]}
    first = datetime.date.fromisoformat(table["rows"][0]["date"])
    dates = (first + datetime.timedelta(days=day) for day in range(days))
    return [counts.get(date.isoformat(), 0) for date in dates]


def days_of_months(months: Sequence[str]) -> int:
    """Returns the number of days in these months and all months between them."""
    first = datetime.date.fromisoformat(f"{months[0]}-01")
    last = datetime.date.fromisoformat(f"{months[-1]}-01")
    following = (last.replace(day=28) + datetime.timedelta(days=4)).replace(day=1)
    return (following - first).days


def class_of_column(name: str) -> str:
    """Returns the class of a column of Table VII."""
    code = name.removeprefix("xid")
    return class_of_xid(int(code)) if name.startswith("xid") and code.isdecimal() else name
