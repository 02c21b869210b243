"""Heat maps: a table of values as cells of one hue, darker for more."""

from collections.abc import Sequence

from fireflyer.charts import svg
from fireflyer.charts.axes import number
from fireflyer.charts.svg import Markup

MOST = 80
"""Maximum rows and columns; larger tables are averaged in groups."""

WIDTH = 720
LEFT, TOP = 110, 30
LETTER = 7.2
"""Width of a letter of a row's name."""


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str],
    values: Sequence[Sequence[float | None]], unit: str = "", high: float | None = None, *,
    marks: Sequence[Sequence[str]] | None = None, tips: Sequence[Sequence[str]] | None = None,
    links: Sequence[str] | None = None,
) -> Markup:  # fmt: skip
    """Draws a table of values. A cell with neither a value nor a mark stays empty.

    `marks`, `tips` and `links` need a table of at most `MOST` rows and columns.

    Args:
        title: text above the cells.
        rows: name of each row.
        columns: name of each column.
        values: values, one list per row.
        unit: text after a value.
        high: value of the darkest cell; default: the largest value.
        marks: character in each cell, which is visible without colour; "": none.
        tips: tooltip of each cell; default: the names of its row and column, and its value.
        links: URL to which the cells of each column link.

    Returns:
        An `<svg>` element.

    Raises:
        ValueError: the shape of the values does not match the names, or a table with marks, tips
            or links is too large.
    """
    if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
        raise ValueError(
            f"invalid heat map {title!r}: expected {len(rows)} x {len(columns)} values, one per name"
        )
    if (marks or tips or links) and max(len(rows), len(columns)) > MOST:
        raise ValueError(f"the heat map {title!r} has more than {MOST} rows or columns")
    rows, columns, values = _grouped(rows, columns, values)
    top = max([v for row in values for v in row if v is not None], default=0.0)
    top = high if high is not None else top
    left = max(LEFT, round(LETTER * max(map(len, rows), default=0)) + 8)
    side = min(16.0, (WIDTH - left - 10) / max(len(columns), 1))
    height = TOP + side * len(rows) + 30
    parts = [svg.text(title, 0, 16, kind="title")]
    for line, (name, row) in enumerate(zip(rows, values, strict=True)):
        y = TOP + line * side
        if side >= 10 or line % 4 == 0:
            parts.append(svg.text(name, left - 6, y + side / 2 + 4, "end"))
        for place, value in enumerate(row):
            mark = marks[line][place] if marks else ""
            if value is None and not mark:
                continue
            tip = f"{name}, {columns[place]}: {number(value or 0.0)}{unit}"
            share = min(max((value or 0.0) / top, 0.0), 1.0) if top > 0 else 0.0
            cell = _cell(
                left + place * side, y, side, share, mark, tips[line][place] if tips else tip
            )
            parts.append(svg.element("a", cell, href=links[place]) if links else cell)
    ends = f"{columns[0]} to {columns[-1]}" if columns else ""
    parts.append(svg.text(f"{ends}; darkest: {number(top)}{unit}", left, height - 10))
    return svg.drawing(title, WIDTH, round(height), parts)


def _cell(x: float, y: float, side: float, share: float, mark: str, tip: str) -> Markup:
    opacity = 0.06 + 0.94 * share
    parts = [svg.rect(x, y, side - 1, side - 1, class_="cell", fill_opacity=opacity)]
    if mark:
        name = "mark on" if share > 0.5 else "mark"
        parts.append(svg.text(mark, x + side / 2 - 0.5, y + side / 2 + 3.5, "middle", name))
    return svg.element("g", svg.element("title", tip), *parts)


def _grouped(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]]
) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Averages groups of neighbours until at most `MOST` rows and columns remain."""
    down, across = -(-len(rows) // MOST) or 1, -(-len(columns) // MOST) or 1
    merged: list[list[float | None]] = []
    for start in range(0, len(rows), down):
        line: list[float | None] = []
        for place in range(0, len(columns), across):
            block = [v for row in values[start : start + down] for v in row[place : place + across]]
            seen = [v for v in block if v is not None]
            line.append(sum(seen) / len(seen) if seen else None)
        merged.append(line)
    return _names(rows, down), _names(columns, across), merged


def _names(names: Sequence[str], size: int) -> list[str]:
    groups = [names[start : start + size] for start in range(0, len(names), size)]
    return [group[0] if len(group) == 1 else f"{group[0]}..{group[-1]}" for group in groups]
