"""Line charts with linear or logarithmic axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 36, 48

DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 4", "12 4")
"""Dash patterns of the series, in order."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Named line; `marks` draws a marker at each point, and `line` connects the points.

    A point whose y is NaN is a gap in the line.
    """

    name: str
    points: Sequence[Point]
    marks: bool = False
    line: bool = True


@dataclass(frozen=True)
class Axis:
    """Label and kind of an axis. A linear axis starts at 0 unless `low` says otherwise."""

    label: str
    log: bool = False
    low: float | None = 0.0


@dataclass(frozen=True)
class Scale:
    """Mapping of values from `low` to `high` to drawing coordinates from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        """Returns the coordinate of a value, clamped to the axis."""
        low, high = self._seen(self.low), self._seen(self.high)
        share = (self._seen(value) - low) / ((high - low) or 1.0)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def _seen(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    def ticks(self) -> list[float]:
        """Returns round numbers along the axis."""
        return decades(self.low, self.high) if self.log else ticks(self.low, self.high, 6)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Returns about `about` round numbers in [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first
    return [float(f"{(first + i) * step:.12g}") for i in range(count + 1)]


def decades(low: float, high: float) -> list[float]:
    """Returns the powers of ten in [low, high]; if at most two, also their multiples by 2 and 5."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if high / low > 100 else (1, 2, 5)
    marks = [factor * 10.0**power for power in powers for factor in factors]
    return [mark for mark in marks if low * 0.999 <= mark <= high * 1.001] or [low, high]


def number(value: float) -> str:
    """Returns a short text of a value: 1,500 or 0.25 or 3e+09."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.3g}"


def line_chart(
    title: str, across: Axis, up: Axis, series: Sequence[Series],
    size: tuple[int, int] = (WIDTH, HEIGHT),
) -> str:  # fmt: skip
    """Draws series over one pair of axes, with a legend below the title.

    Points that a logarithmic axis cannot show (0 and below) are omitted.

    Args:
        title: text above the drawing.
        across: horizontal axis.
        up: vertical axis.
        series: lines; each gets its own dash pattern.
        size: width and height in units of the drawing.

    Returns:
        An `<svg>` element.

    Raises:
        ValueError: no series has a point to show.
    """
    kept = [
        Series(one.name, [p for p in one.points if _shown(p, across, up)], one.marks, one.line)
        for one in series
    ]
    every = [point for one in kept for point in one.points if not math.isnan(point[1])]
    if not every:
        raise ValueError(f"the chart {title!r} has no point to show")
    width, height = size
    x = _scale(across, [p[0] for p in every], LEFT, width - RIGHT)
    y = _scale(up, [p[1] for p in every], height - BOTTOM, TOP + 22)
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>',
        *_grid(x, y, across, up, size),
    ]
    place = float(LEFT)
    for index, one in enumerate(kept):
        parts += _legend(one, index, place)
        place += 46 + 7.2 * len(one.name)
        parts += _line(one, index, x, y)
    return "\n".join([*parts, "</svg>"])


def _shown(point: Point, across: Axis, up: Axis) -> bool:
    x, y = point
    if not math.isfinite(x) or math.isinf(y):
        return False
    if math.isnan(y):
        return x > 0 or not across.log
    return (x > 0 or not across.log) and (y > 0 or not up.log)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    low, high = min(values), max(values)
    if not axis.log and axis.low is not None:
        low = min(low, axis.low)
    if high <= low:
        high = low * 10 if axis.log else low + 1.0
    if not axis.log:
        marks = ticks(low, high, 6)
        step = marks[1] - marks[0] if len(marks) > 1 else high - low
        high = max(high, math.ceil(high / step - 1e-9) * step)
    return Scale(low, high, start, end, axis.log)


def _grid(x: Scale, y: Scale, across: Axis, up: Axis, size: tuple[int, int]) -> list[str]:
    width, height = size
    parts = []
    for value in y.ticks():
        at = y.at(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>'
        )
    for value in x.ticks():
        at = x.at(value)
        parts.append(
            f'<text x="{at:.1f}" y="{height - BOTTOM + 18}" text-anchor="middle">{number(value)}</text>'
        )
    middle = (LEFT + width - RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{height - 8}" text-anchor="middle">{escape(across.label)}</text>'
    )
    high = (TOP + height - BOTTOM) / 2
    turn = f'transform="rotate(-90 14 {high:.0f})"'
    parts.append(
        f'<text x="14" y="{high:.0f}" text-anchor="middle" {turn}>{escape(up.label)}</text>'
    )
    return parts


def _style(index: int) -> str:
    dash = DASHES[index % len(DASHES)]
    return f'class="s{index % 6}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _legend(one: Series, index: int, place: float) -> list[str]:
    mark = _mark(index, place + 14, 30) if one.marks else ""
    line = f'<path {_style(index)} d="M{place:.0f},30 h28"/>' if one.line else ""
    return [line, mark, f'<text x="{place + 34:.0f}" y="34">{escape(one.name)}</text>']


def _line(one: Series, index: int, x: Scale, y: Scale) -> list[str]:
    parts = []
    if one.line:
        path, gap = "", True
        for px, py in one.points:
            if not math.isnan(py):
                path += f"{' M' if gap else ' L'}{x.at(px):.1f},{y.at(py):.1f}"
            gap = math.isnan(py)
        if path:
            parts.append(f'<path {_style(index)} d="{path.lstrip()}"/>')
    if one.marks:
        for px, py in one.points:
            if not math.isnan(py):
                tip = f"{one.name}: {number(px)}, {number(py)}"
                mark = _mark(index, x.at(px), y.at(py))
                parts.append(f"<g><title>{escape(tip)}</title>{mark}</g>")
    return parts


def _mark(index: int, x: float, y: float) -> str:
    name = f'class="m{index % 6}"'
    shapes = (
        f'<circle {name} cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        f'<rect {name} x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>',
        f'<path {name} d="M{x:.1f},{y - 5:.1f} l5,9 h-10 z"/>',
        f'<path {name} d="M{x:.1f},{y - 5:.1f} l5,5 l-5,5 l-5,-5 z"/>',
    )
    return shapes[index % len(shapes)]
