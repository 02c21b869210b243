"""Named curves as SVG text: panels side by side, with one legend below."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fireflyer.charts import axes, svg
from fireflyer.charts.axes import Scale
from fireflyer.charts.svg import Markup, Point

WIDTH, HEIGHT = 440, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 44, 42
_LINE = 18  # height of a legend line
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#57606a", "#bf8700")
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#57606a}.title{font-weight:600;fill:#24292f}"
    ".grid{stroke:#d0d7de}polyline{fill:none;stroke-width:1.8}"
)


class Curve(NamedTuple):
    """Named curve of a panel.

    Attributes:
        points: points in the order of the horizontal axis; at least one.
        dashed: True for figures quoted from elsewhere; their points get dots.
        dots: True if each point gets a dot with a tooltip.
    """

    name: str
    points: Sequence[Point]
    dashed: bool = False
    dots: bool = False


class Panel(NamedTuple):
    """One plot, with its axes and curves.

    Attributes:
        low, high: limits of the vertical axis.
        marks: values labelled on the horizontal axis.
        log: True if the horizontal axis is logarithmic.
        label: formats a value of the horizontal axis.
    """

    title: str
    unit: str
    axis: str
    curves: Sequence[Curve]
    low: float
    high: float
    marks: Sequence[float]
    log: bool = False
    label: Callable[[float], str] = "{:g}".format


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Returns an SVG file; curves with the same name have the same colour in all panels.

    If there are several names, a legend below the panels explains the colours.
    """
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    dashed = {curve.name: curve.dashed for panel in panels for curve in panel.curves}
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    columns = 2 * len(panels)
    width = WIDTH * len(panels)
    explained = names if len(names) > 1 else []
    height = HEIGHT + _LINE * math.ceil(len(explained) / columns) + 10 * bool(explained)
    parts = []
    for index, panel in enumerate(panels):
        parts += _panel(panel, index * WIDTH, colours)
    for at, name in enumerate(explained):
        x = 16 + at % columns * (width - 16) / columns
        y = HEIGHT + _LINE * (at // columns) + 6
        parts.append(_stroke([(x, y), (x + 22, y)], colours[name], dashed[name]))
        parts.append(svg.text(name, x + 28, y + 4))
    return svg.file(title, width, height, parts, _STYLE)


def _panel(panel: Panel, left: int, colours: dict[str, str]) -> list[Markup]:
    x0, x1 = left + _LEFT, left + WIDTH - _RIGHT
    y0, y1 = HEIGHT - _BOTTOM, _TOP
    ends = [x for curve in panel.curves for x, _ in curve.points] + list(panel.marks)
    x = Scale(min(ends), max(ends), x0, x1, panel.log)
    y = Scale(panel.low, panel.high, y0, y1, False)
    parts = [
        svg.text(panel.title, x0, 16, kind="title"),
        svg.text(panel.unit, x0, 32),
        svg.text(panel.axis, (x0 + x1) / 2, HEIGHT - 6, "middle"),
        *axes.rows(y, x0, x1, about=4),
        *(svg.text(panel.label(mark), x.at(mark), y0 + 16, "middle") for mark in panel.marks),
    ]
    for curve in panel.curves:
        colour = colours[curve.name]
        places = [(x.at(across), y.at(up)) for across, up in curve.points]
        parts.append(_stroke(places, colour, curve.dashed))
        if curve.dashed or curve.dots or len(places) == 1:
            for place, (at, value) in zip(places, curve.points, strict=True):
                tip = f"{curve.name}, {panel.label(at)}: {value:,.4g}"
                parts.append(svg.circle(*place, 3.5, tip, fill=colour))
    return parts


def _stroke(places: Sequence[Point], colour: str, dashed: bool) -> Markup:
    dash = "5 4" if dashed else None
    points = svg.joined(places)
    return svg.element("polyline", points=points, stroke=colour, stroke_dasharray=dash)


def round_up(value: float) -> float:
    """Rounds up to 1, 2, 5 or 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * 0.999)


def short(value: float) -> str:
    """Returns a short form of a value: 10k, 100M, 4Ki."""
    for size, unit in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    for size, unit in ((10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
