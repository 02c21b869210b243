"""Heat maps: a table of values as cells of one hue, darker for more."""

from collections.abc import Sequence
from html import escape

from fireflyer.charts.axes import number

MOST = 80
"""Rows and columns at most; more are averaged in groups."""

WIDTH = 720
LEFT, TOP = 110, 30


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str],
    values: Sequence[Sequence[float | None]], unit: str = "", high: float | None = None,
) -> str:  # fmt: skip
    """Draws a table of values. A cell without a value stays empty.

    Args:
        title: text above the cells.
        rows: name of each row.
        columns: name of each column.
        values: one list a row.
        unit: text after a value.
        high: value of the darkest cell; default: the largest one.

    Returns:
        An `<svg>` element.

    Raises:
        ValueError: the shape of the values does not match the names.
    """
    if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
        raise ValueError(
            f"the heat map {title!r} has {len(rows)} x {len(columns)} names, other values"
        )
    rows, columns, values = _grouped(rows, columns, values)
    top = max([v for row in values for v in row if v is not None], default=0.0)
    top = high if high is not None else top
    side = min(16.0, (WIDTH - LEFT - 10) / max(len(columns), 1))
    height = TOP + side * len(rows) + 30
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<text class="title" x="0" y="16">{escape(title)}</text>',
    ]
    for line, (name, row) in enumerate(zip(rows, values, strict=True)):
        y = TOP + line * side
        if side >= 10 or line % 4 == 0:
            parts.append(
                f'<text x="{LEFT - 6}" y="{y + side / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>'
            )
        for place, value in enumerate(row):
            if value is None:
                continue
            share = min(max(value / top, 0.0), 1.0) if top > 0 else 0.0
            told = escape(f"{name}, {columns[place]}: {number(value)}{unit}")
            box = f'x="{LEFT + place * side:.1f}" y="{y:.1f}" width="{side - 1:.1f}"'
            shade = f'height="{side - 1:.1f}" fill-opacity="{0.06 + 0.94 * share:.2f}"'
            parts.append(f'<rect class="cell" {box} {shade}><title>{told}</title></rect>')
    foot = height - 10
    ends = f"{columns[0]} to {columns[-1]}" if columns else ""
    parts.append(
        f'<text x="{LEFT}" y="{foot:.0f}">{escape(ends)}; darkest: {number(top)}{escape(unit)}</text>'
    )
    return "\n".join([*parts, "</svg>"])


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
