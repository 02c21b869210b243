"""Contradictions between tables of one site, and between the paper's tables and its text. Pure.

Contradictions between tables are searched for in the data of any site. Contradictions with the text
are searched for only in the paper's own three tables.
"""

from collections.abc import Iterable

import msgspec

from fireflyer.validator.failures.records import NETWORK, Source
from fireflyer.validator.failures.tables import Table

PAPER_TOTALS = (12_970, 292, 213)
"""Sums of the paper's Tables VI, VII and VIII."""


class Contradiction(msgspec.Struct, frozen=True, kw_only=True):
    """Two statements that cannot both hold."""

    subject: str
    text: str


def between_tables(
    sources: Iterable[Source], xids: Table | None, months: Table | None, days: Table | None
) -> list[Contradiction]:
    """Compares the tables of one site with each other and with the sums that its files state."""
    found = []
    for source in sources:
        found += _stated_totals(source, months)
        found += _empty_days(source)
    if months is not None and days is not None:
        found += _months_against_days(months, days)
    if months is not None and xids is not None:
        found += _part_above_whole(months, xids)
    return found


def _stated_totals(source: Source, months: Table | None) -> list[Contradiction]:
    rows = {row["month"]: row["total"] for row in (months or {"rows": []})["rows"]}
    return [
        Contradiction(
            subject=f"total of {month}",
            text=f"{source.name} states {total}; the row's counts add up to {rows[month]}",
        )
        for month, total in source.totals.items()
        if month in rows and rows[month] != total
    ]


def _empty_days(source: Source) -> list[Contradiction]:
    counts = dict.fromkeys(source.days, 0)
    dates = (failure for failure in source.failures if failure.period == "day")
    for day, failure in zip(source.days, dates, strict=False):
        counts[day] = failure.count
    return [
        Contradiction(
            subject=day,
            text=f"{source.name} lists only days with failures, yet lists {day} with 0",
        )
        for day, count in counts.items()
        if not count
    ]


def _months_against_days(months: Table, days: Table) -> list[Contradiction]:
    """Compares the column `network` by month with the counts by day, in months that both cover."""
    if NETWORK not in months["columns"]:
        return []
    first, last = days["rows"][0]["date"], days["rows"][-1]["date"]
    found = []
    for row in months["rows"]:
        month, by_month = row["month"], row[NETWORK]
        by_day = days["months"].get(month, 0)
        if first[:7] < month <= last[:7] and by_month != by_day:
            found.append(
                Contradiction(
                    subject=f"network failures of {month}",
                    text=f"{by_month} in the table by month (VII), but {by_day} in the table by day "
                    "(VIII)",
                )
            )
    return found


def _part_above_whole(months: Table, xids: Table) -> list[Contradiction]:
    """Finds Xid codes with more failures in some months than in the whole year."""
    year = {f"xid{row['xid']}": row["count"] for row in xids["rows"]}
    return [
        Contradiction(
            subject=name,
            text=f"{count} in {len(months['rows'])} months (VII), but {year.get(name, 0)} in the year "
            "(VI)",
        )
        for name, count in months["sums"].items()
        if name.startswith("xid") and count > year.get(name, 0)
    ]


def against_text(
    xids: Table | None, months: Table | None, days: Table | None
) -> list[Contradiction]:
    """Compares the paper's tables with statements of its text; returns [] for other sites' data."""
    if xids is None or months is None or days is None:
        return []
    if (xids["total"], months["sums"]["total"], days["total"]) != PAPER_TOTALS:
        return []
    of_class = {name: entry["count"] for name, entry in xids["classes"].items()}
    nvlink, hardware = of_class["nvlink"], xids["total"] - of_class["software"]
    sums = months["sums"]
    differing = sum(row[NETWORK] - days["months"].get(row["month"], 0) for row in months["rows"])
    corrected = sums[NETWORK] - differing, sums["total"] - differing
    return [
        Contradiction(
            subject="share of network failures, 30 %",
            text=f"Table VII: {sums[NETWORK]} of {sums['total']}, {sums[NETWORK] / sums['total']:.1%}; "
            f"with the counts of Table VIII: {corrected[0]} of {corrected[1]}, "
            f"{corrected[0] / corrected[1]:.1%}",
        ),
        Contradiction(
            subject="Xid 74 several orders of magnitude above other faults",
            text=f"its {nvlink} errors are {nvlink / of_class['gpu_ecc']:.0f} times the ECC errors and "
            f"{nvlink / of_class['uncorrectable']:.0f} times the uncorrectable errors",
        ),
        Contradiction(
            subject="NVLink, 42.57 % here against 52.42 % elsewhere",
            text=f"42.57 % is NVLink's share of all log messages, software's included; of hardware's "
            f"messages it is {nvlink / hardware:.1%}. 52.42 % (54 of 103, NSDI 2024) is a share of "
            "failures: the two figures cannot be compared",
        ),
    ]
