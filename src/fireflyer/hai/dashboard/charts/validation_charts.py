"""Charts of validations: heat maps of a fleet and of one node, and one measured value ("figure") of
a node over time. Pure."""

from collections.abc import Sequence
from urllib.parse import quote, urlencode

from fireflyer.charts import Axis, Series, heat_map, line_chart
from fireflyer.charts.axes import number
from fireflyer.hai.dashboard.text_filters import clock, short
from fireflyer.hai.model.validations import Ended, Finding
from fireflyer.hai.validation.health import SEVERITY, Cell, Health, Standing, loss

ROOT = "/dashboard/validations"

MOST_COLUMNS = 40
"""Maximum columns of a heat map. If there are more nodes, several nodes share a column, which
shows the worst of them."""

MARKS: dict[Standing, str] = {"passed": "", "not run": "·", "worse": "!", "failed": "×"}

DARKEST = 0.2
"""A cell has the darkest shade if its loss against the fleet's median is at least this share."""

DAY_S = 86_400.0


def groups(nodes: Sequence[str]) -> list[Sequence[str]]:
    """Divides nodes among at most MOST_COLUMNS columns; adjacent nodes share a column."""
    size = max(-(-len(nodes) // MOST_COLUMNS), 1)
    return [nodes[at : at + size] for at in range(0, len(nodes), size)]


def fleet_map(found: Health, part: int | None) -> str:
    """Draws all nodes of a fleet, a row for each figure.

    Args:
        found: results to draw, with at least one node and one figure.
        part: draw only the nodes of this column of the complete map; None: all.

    Raises:
        IndexError: the map has no such column.
    """
    nodes = found.nodes if part is None else groups(found.nodes)[part]
    columns = groups(nodes)
    cells = [
        [_worst([row[n] for n in column if n in row]) for column in columns]
        for row in (found.cells[figure] for figure in found.figures)
    ]
    names = [_name(column) for column in columns]
    links = [
        f"{ROOT}/{quote(column[0], safe='')}" if len(column) == 1 else f"{ROOT}?part={at}"
        for at, column in enumerate(columns)
    ]
    whole = part is None or all(len(column) == 1 for column in columns)
    return heat_map(
        "Loss against the fleet's median", [short(name, 20) for name in found.figures], names,
        [[_shade(cell) for cell in row] for row in cells], " %", 100 * DARKEST,
        marks=[[MARKS[cell.standing] if cell else "" for cell in row] for row in cells],
        tips=[[_tip(cell) if cell else "" for cell in row] for row in cells],
        links=links if whole else None,
    )  # fmt: skip


def _name(column: Sequence[str]) -> str:
    first = short(column[0], 24)
    return first if len(column) == 1 else f"{first} to {short(column[-1], 24)}"


def _worst(cells: Sequence[Cell]) -> Cell | None:
    return max(cells, key=lambda c: (SEVERITY.index(c.standing), c.loss or 0.0), default=None)


def _shade(cell: Cell | None) -> float | None:
    """Returns the percentage to shade a cell by; None: an empty cell."""
    if cell is None or cell.standing == "not run":
        return None
    if cell.standing == "failed":
        return 100 * DARKEST
    return 100 * max(cell.loss or 0.0, 0.0)


def _tip(cell: Cell) -> str:
    text = f"{cell.node}, {cell.figure}: {cell.standing}"
    if cell.value is not None:
        text += f", {number(cell.value)} {cell.unit}".rstrip()
    if cell.loss is not None:
        text += f", {abs(cell.loss):.1%} {'below' if cell.loss > 0 else 'above'} the fleet"
    return short(f"{text}, {cell.reason}" if cell.reason else text, 200)


def node_map(entries: Sequence[Ended], fleet: Health) -> str:
    """Draws the validations of one node, a column for each, oldest first.

    Args:
        entries: validations with results, at least one.
        fleet: gives the medians to compare with.
    """
    figures = [name for name in fleet.figures if any(_of(e, name) for e in entries)]
    figures += sorted({f.name for e in entries for f in e.findings} - set(figures))
    rows = [[_past(entry, name, fleet) for entry in entries] for name in figures]
    return heat_map(
        "Loss against the fleet's median now",
        [short(name, 20) for name in figures], [clock(entry.wall) for entry in entries],
        [[_shade(cell) for cell in row] for row in rows], " %", 100 * DARKEST,
        marks=[[MARKS[cell.standing] if cell else "" for cell in row] for row in rows],
        tips=[[_tip(cell) if cell else "" for cell in row] for row in rows],
    )  # fmt: skip


def _of(entry: Ended, figure: str) -> Finding | None:
    return next((found for found in entry.findings if found.name == figure), None)


def _past(entry: Ended, figure: str, fleet: Health) -> Cell | None:
    found = _of(entry, figure)
    if found is None:
        return None
    return Cell(
        node=clock(entry.wall), figure=figure, standing=found.status, value=found.value,
        unit=found.unit, loss=loss(found, fleet.medians.get(figure)), reason=found.reason,
    )  # fmt: skip


def figure_chart(entries: Sequence[Ended], figure: str, fleet: Health, now: float) -> str:
    """Draws one figure of a node over time beside the fleet's median; "" without a value."""
    points = [
        ((entry.wall - now) / DAY_S, found.value, found.unit)
        for entry in entries
        if (found := _of(entry, figure)) is not None and found.value is not None
    ]
    if not points:
        return ""
    series = [Series("this node", [(day, value) for day, value, _ in points], marks=True)]
    if (median := fleet.medians.get(figure)) is not None:
        series.append(Series("fleet, median now", [(points[0][0], median), (0.0, median)]))
    up = Axis(points[-1][2] or "value")
    return line_chart(short(figure, 40), Axis("days from now", low=None), up, series)


def figure_link(node: str, figure: str) -> str:
    """Returns the address of the page with one figure of a node."""
    return f"{ROOT}/{quote(node, safe='')}?{urlencode({'figure': figure})}"
