"""Markdown table of the `bench train` rows that have goals, for docs/benchmarks/haiscale-bench.md."""

import re
from collections.abc import Sequence

from fireflyer.bench.harness.report import Row

_LAYOUT = re.compile(r" (\d+x\d+)(?=,)")
HERE = "this host"


def goal_table(rows: Sequence[Row]) -> str:
    """Returns a table with one line per case and one column per layout.

    A cell is the ratio of our value to the peer's, marked if it missed the goal.
    """
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row.goal is None or row.ratio is None:
            continue
        layout = _LAYOUT.search(row.case)
        case = _LAYOUT.sub("", row.case)
        cells.setdefault((case, row.peer), {})[layout[1] if layout else HERE] = row
    columns = list(dict.fromkeys(layout for found in cells.values() for layout in found))
    lines = [_line(["case", "over", "must, aim", *columns]), "|---" * (3 + len(columns)) + "|"]
    for (case, peer), found in cells.items():
        some = next(iter(found.values()))
        shown = [_cell(found[layout]) if layout in found else "" for layout in columns]
        lines.append(_line([case, peer, _asked(some), *shown]))
    return "\n".join([*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _asked(row: Row) -> str:
    assert row.goal is not None
    aim = "" if row.aim is None else f", {_share(row.aim)}"
    return _share(row.goal) + aim


def _cell(row: Row) -> str:
    assert row.ratio is not None
    return f"**{_share(row.ratio)}, missed**" if row.missed else _share(row.ratio)


def _share(ratio: float) -> str:
    """Returns the ratio of our value to the peer's, from the ratio by which ours is better."""
    return f"{1 / ratio:.3f}".rstrip("0").rstrip(".") + "x"
