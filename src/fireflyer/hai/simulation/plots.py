"""Plots as inline SVG text. Colours are classes of the page's style sheet, so that they suit light
and dark."""

import math
from collections.abc import Mapping, Sequence
from html import escape

import msgspec

from fireflyer.charts.axes import ticks

WIDTH, HEIGHT = 480, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 42


class Axis(msgspec.Struct, frozen=True):
    """Axis from `low` to `high`, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def part(self, value: float) -> float:
        """Returns the position of a value, 0 to 1; values outside are moved to the edge."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log10(max(each, 1e-12)) for each in (value, low, high))
        return min(max((value - low) / ((high - low) or 1.0), 0.0), 1.0)

    def ticks(self, about: int = 5) -> list[float]:
        """Returns round values on the axis."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            step = max((last - first) // about, 1)
            return [10.0**power for power in range(first, last + 1, step)]
        return ticks(self.low, self.high, about)


def lines(
    name: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x: Axis,
    y: Axis,
    labels: tuple[str, str],
) -> str:
    """Draws one line per series: name -> (xs, ys). `labels` are those of the axes."""
    body = []
    for number, (label, (xs, ys)) in enumerate(series.items()):
        points = " ".join(f"{_x(x, a):.1f},{_y(y, b):.1f}" for a, b in zip(xs, ys, strict=True))
        body.append(
            f'<polyline class="line s{number}" points="{points}"><title>{escape(label)}</title></polyline>'
        )
    return _frame(name, x, y, labels, "".join(body))


def bars(
    name: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    y: Axis,
    label: str,
    unit: str,
) -> str:
    """Draws bars side by side: name -> one value per group; None: no bar."""
    wide = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    each = wide * 0.8 / max(len(series), 1)
    body = []
    for number, (which, values) in enumerate(series.items()):
        for group, value in enumerate(values):
            if value is not None:
                left = LEFT + group * wide + wide * 0.1 + number * each
                top = _y(y, value)
                body.append(
                    f'<rect class="bar s{number}" x="{left:.1f}" y="{top:.1f}" width="{each:.1f}" '
                    f'height="{HEIGHT - BOTTOM - top:.1f}"><title>{escape(which)}, {escape(groups[group])}: '
                    f"{number_text(value)} {unit}</title></rect>"
                )
    for group, text in enumerate(groups):
        middle = LEFT + (group + 0.5) * wide
        body.append(
            f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(text)}</text>'
        )
    return _frame(name, None, y, ("GPUs asked for", label), "".join(body))


def stacks(name: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """Draws one horizontal bar per row, made of its parts in their order; the parts of a row sum to
    1."""
    high = 34
    body = []
    for number, (row, parts) in enumerate(rows.items()):
        top = number * (high + 24) + 18
        body.append(f'<text x="0" y="{top - 5}">{escape(row)}</text>')
        left = 0.0
        for part, (cause, share) in enumerate(parts.items()):
            width = share * WIDTH
            body.append(
                f'<rect class="part c{part}" x="{left:.2f}" y="{top}" width="{width:.2f}" height="{high}">'
                f"<title>{escape(row)}: {escape(cause)} {share:.2%}</title></rect>"
            )
            if width > 44:
                body.append(
                    f'<text class="in" x="{left + width / 2:.1f}" y="{top + 22}" '
                    f'text-anchor="middle">{share:.1%}</text>'
                )
            left += width
    return _svg(name, WIDTH, len(rows) * (high + 24), "".join(body))


def number_text(value: float) -> str:
    """Formats a number as short as readable: 0.012, 3.4, 1,240."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.2e}" if "e" in text else text


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.part(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.part(value) * (HEIGHT - TOP - BOTTOM)


def _frame(name: str, x: Axis | None, y: Axis, labels: tuple[str, str], body: str) -> str:
    """Draws grid, ticks and labels around a body."""
    parts = []
    for value in y.ticks():
        at = _y(y, value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number_text(value)}</text>'
        )
    for value in x.ticks() if x else ():
        at = _x(x, value) if x else 0.0
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number_text(value)}</text>'
        )
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(labels[0])}</text>'
        f'<text class="label" transform="translate(12 {(HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(labels[1])}</text>'
    )
    return _svg(name, WIDTH, HEIGHT, "".join(parts) + body)


def _svg(name: str, width: int, height: int, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )
