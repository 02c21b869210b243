"""Line charts with linear or logarithmic axes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fireflyer.charts import svg
from fireflyer.charts.svg import Markup, Point

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 36, 48
LETTER = 7.2
"""Width of a letter of a legend, in units of the drawing."""

DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 4", "12 4")
"""Dash patterns of the series, in order."""


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
    """Label and kind of an axis. A linear axis starts at `low`, or at the smallest value if that is less
    or `low` is None."""

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

    def ticks(self, about: int = 6) -> list[float]:
        """Returns round numbers along the axis; about `about` of them if the axis is linear."""
        return decades(self.low, self.high) if self.log else ticks(self.low, self.high, about)


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
    """Returns the powers of ten in [low, high]; if high / low is at most 100, also 2 and 5 times these."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if high / low > 100 else (1, 2, 5)
    marks = [factor * 10.0**power for power in powers for factor in factors]
    return [mark for mark in marks if low * 0.999 <= mark <= high * 1.001] or [low, high]


def number(value: float) -> str:
    """Returns a short text of a value: 1,500 or 0.25 or 3e+09."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.3g}"


def rows(
    y: Scale, left: float, right: float, form: Callable[[float], str] = number, about: int = 6
) -> list[Markup]:
    """Draws a grid line and a label at each tick of a vertical axis."""
    return [
        part
        for value in y.ticks(about)
        for part in (
            svg.line(left, y.at(value), right, y.at(value)),
            svg.text(form(value), left - 8, y.at(value) + 4, "end"),
        )
    ]


def columns(
    x: Scale, foot: float, form: Callable[[float], str] = number, about: int = 6
) -> list[Markup]:
    """Draws a label below the drawing at each tick of a horizontal axis."""
    return [svg.text(form(value), x.at(value), foot + 18, "middle") for value in x.ticks(about)]


def labels(across: str, up: str, size: tuple[int, int]) -> list[Markup]:
    """Draws the labels of both axes at the edges of a drawing."""
    width, height = size
    middle = round((TOP + height - BOTTOM) / 2)
    turned = f"rotate(-90 14 {middle})"
    return [
        svg.text(across, (LEFT + width - RIGHT) / 2, height - 8, "middle"),
        svg.text(up, 14, middle, "middle", transform=turned),
    ]


def legend_places(names: Sequence[str], width: float) -> list[Point]:
    """Returns the top left corner of each legend entry. An entry that does not fit into a row
    begins the next row."""
    places, x, y = [], float(LEFT), 22.0
    for name in names:
        size = 46 + LETTER * len(name)
        if x > LEFT and x + size > width:
            x, y = float(LEFT), y + 18
        places.append((x, y))
        x += size
    return places


def line_chart(
    title: str, across: Axis, up: Axis, series: Sequence[Series],
    size: tuple[int, int] = (WIDTH, HEIGHT),
) -> Markup:  # fmt: skip
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
    places = legend_places([one.name for one in kept], width)
    x = scale(across, [p[0] for p in every], LEFT, width - RIGHT)
    y = scale(up, [p[1] for p in every], height - BOTTOM, places[-1][1] + 36)
    parts = [
        svg.text(title, LEFT, 16, kind="title"),
        *rows(y, LEFT, width - RIGHT), *columns(x, height - BOTTOM),
        *labels(across.label, up.label, size),
    ]  # fmt: skip
    for index, (one, place) in enumerate(zip(kept, places, strict=True)):
        parts += _legend(one, index, place)
        parts += _line(one, index, x, y)
    return svg.drawing(title, width, height, parts)


def _shown(point: Point, across: Axis, up: Axis) -> bool:
    x, y = point
    if not math.isfinite(x) or math.isinf(y):
        return False
    if math.isnan(y):
        return x > 0 or not across.log
    return (x > 0 or not across.log) and (y > 0 or not up.log)


def scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    """Returns the scale of an axis that shows all values."""
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


def _path(index: int, points: str) -> Markup:
    dash = DASHES[index % len(DASHES)] or None
    return svg.element("path", class_=f"s{index % 6}", stroke_dasharray=dash, d=points)


def _legend(one: Series, index: int, place: Point) -> list[Markup]:
    x, y = place
    parts = [svg.text(one.name, x + 34, y + 12)]
    if one.line:
        parts.append(_path(index, f"M{x:.0f},{y + 8:.0f} h28"))
    if one.marks:
        parts.append(_mark(index, x + 14, y + 8))
    return parts


def _line(one: Series, index: int, x: Scale, y: Scale) -> list[Markup]:
    parts = []
    if one.line:
        path, gap = "", True
        for px, py in one.points:
            if not math.isnan(py):
                path += f"{' M' if gap else ' L'}{x.at(px):.1f},{y.at(py):.1f}"
            gap = math.isnan(py)
        if path:
            parts.append(_path(index, path.lstrip()))
    if one.marks:
        for px, py in one.points:
            if not math.isnan(py):
                tip = svg.element("title", f"{one.name}: {number(px)}, {number(py)}")
                parts.append(svg.element("g", tip, _mark(index, x.at(px), y.at(py))))
    return parts


def _mark(index: int, x: float, y: float) -> Markup:
    name = f"m{index % 6}"
    shape = index % 4
    if shape == 0:
        return svg.circle(x, y, 4, class_=name)
    if shape == 1:
        return svg.rect(x - 4, y - 4, 8, 8, class_=name)
    sides = "l5,9 h-10 z" if shape == 2 else "l5,5 l-5,5 l-5,-5 z"
    return svg.element("path", class_=name, d=f"M{x:.1f},{y - 5:.1f} {sides}")
