"""Report of a site's failures: tables, rates, nodes that fail too often (lemons), contradictions.

Pure.
"""

from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import Any

import msgspec

from fireflyer.errors import ValidatorError
from fireflyer.validator.failures import claims, tables
from fireflyer.validator.failures.records import NETWORK, Failure, Source, parse
from fireflyer.validator.failures.statistics import Rate, lemons, rate

DAY_S = 86_400.0

PAPER = ("xid_year.csv", "failures_by_month.csv", "flash_cuts.csv")
PAPER_NODES = 1250
"""Number of nodes in the paper's cluster: 10,000 GPUs, 8 a node."""

YEAR_DAYS = 365.0


def paper() -> list[Source]:
    """Returns the raw data of the paper's Tables VI, VII and VIII."""
    folder = resources.files("fireflyer.validator.failures") / "paper"
    return [parse((folder / name).read_text(encoding="utf-8"), name) for name in PAPER]


def report(
    sources: Sequence[Source], *, nodes: int | None = None, days: float | None = None
) -> dict[str, Any]:
    """Computes the report.

    Args:
        sources: failures of one site.
        nodes: size of the fleet; None: unknown, so there are no rates per node and no lemons.
        days: length of the observation of single failures; None: the time from the first failure to
            the last, which is slightly too short.

    Returns:
        `table_vi`, `table_vii`, `table_viii` (None without such data), `rates`, `lemons`,
        `contradictions` and `notes`.

    Raises:
        ValidatorError: the sources have no failure.
    """
    if not any(source.failures for source in sources):
        names = ", ".join(source.name for source in sources)
        raise ValidatorError(f"{names}: the files contain no failures")
    six = tables.xid_table(sources)
    seven = tables.month_table(sources)
    eight = tables.day_table(sources, NETWORK)
    single = [f for source in sources for f in source.failures if f.period == "moment"]
    notes: list[str] = []
    rates = _single_rates(single, nodes, days, notes) or _table_rates(six, seven, eight, nodes)
    found = claims.between_tables(sources, six, seven, eight)
    found += claims.against_text(six, seven, eight)
    return {
        "table_vi": six,
        "table_vii": seven,
        "table_viii": eight,
        "rates": msgspec.to_builtins(rates),
        "lemons": _lemons(single, nodes, notes),
        "contradictions": msgspec.to_builtins(found),
        "notes": notes,
    }


def _single_rates(
    single: Sequence[Failure], nodes: int | None, days: float | None, notes: list[str]
) -> list[Rate]:
    if not single:
        return []
    first, last = min(f.when for f in single), max(f.when for f in single)
    seen = (last - first) / DAY_S
    if days is None:
        notes.append(
            f"observed from the first failure to the last, {seen:.1f} days; give --days if the "
            "observation was longer"
        )
        days = max(seen, 1 / 24)
    elif days < seen:
        raise ValidatorError(
            f"invalid days {days:g}: the failures lie {seen:.1f} days apart; give at least that"
        )
    counts = Counter(failure.of for failure in single)
    whole = int(days)
    found = []
    for of, count in [*counts.most_common(), ("all", len(single))]:
        daily = None
        if whole >= 2:
            of_day = Counter(int((f.when - first) // DAY_S) for f in single if of in ("all", f.of))
            daily = [of_day[day] for day in range(max(whole, max(of_day) + 1))]
        found.append(rate(of, count, days, nodes, daily))
    return found


def _table_rates(
    six: tables.Table | None, seven: tables.Table | None, eight: tables.Table | None,
    nodes: int | None,
) -> list[Rate]:  # fmt: skip
    """Computes rates from counts: yearly counts for Xid classes, monthly ones for other
    hardware."""
    found: list[Rate] = []
    if six is not None:
        for of, entry in six["classes"].items():
            found.append(rate(f"{of} (VI)", entry["count"], YEAR_DAYS, nodes, None))
    if seven is not None:
        days = float(tables.days_of_months([row["month"] for row in seven["rows"]]))
        of_class: Counter[str] = Counter()
        for name in seven["columns"]:
            of_class[tables.class_of_column(name)] += seven["sums"][name]
        for of, count in of_class.items():
            found.append(rate(f"{of} (VII)", count, days, nodes, None))
        found.append(rate("all (VII)", seven["sums"]["total"], days, nodes, None))
    if eight is not None:
        whole = tables.span(eight)
        counts = tables.daily(eight, whole)
        found.append(rate(f"{NETWORK} (VIII)", eight["total"], float(whole), nodes, counts))
    return found


def _lemons(single: Sequence[Failure], nodes: int | None, notes: list[str]) -> list[Any]:
    counts = Counter(failure.node for failure in single if failure.node)
    if not counts:
        return []
    if nodes is None:
        notes.append("lemon nodes need the size of the fleet: give --nodes")
        return []
    if len(counts) > nodes:
        raise ValidatorError(
            f"invalid nodes {nodes}: failures of {len(counts)} nodes are recorded; give at least that"
        )
    found: list[Any] = msgspec.to_builtins(lemons(counts, nodes))
    return found
