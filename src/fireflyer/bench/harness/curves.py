"""Named curves as SVG text: panels side by side, with one legend below."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 440, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 44, 42
_LINE = 18  # height of a legend line
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#57606a", "#bf8700")
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#57606a}.title{font-weight:600;fill:#24292f}"
    ".grid{stroke:#d0d7de}polyline{fill:none;stroke-width:1.8}"
)

Point = tuple[float, float]


class Curve(NamedTuple):
    """Named curve of a panel.

    Attributes:
        points: points in the order of the horizontal axis; at least one.
        dashed: True for figures quoted from elsewhere; their points get dots.
    """

    name: str
    points: Sequence[Point]
    dashed: bool = False


class Panel(NamedTuple):
    """One plot, with its axes and curves.

    Attributes:
        low, high: limits of the vertical axis.
        doubles: True if each step to the right doubles the value; otherwise all steps are equal.
        marks: values labelled on the horizontal axis.
    """

    title: str
    unit: str
    axis: str
    curves: Sequence[Curve]
    low: float
    high: float
    marks: Sequence[float]
    doubles: bool = False


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Returns an SVG file; curves with the same name have the same colour in all panels."""
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    dashed = {curve.name: curve.dashed for panel in panels for curve in panel.curves}
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    columns = 2 * len(panels)
    width = WIDTH * len(panels)
    height = HEIGHT + _LINE * math.ceil(len(names) / columns) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, index * WIDTH, colours)
    for at, name in enumerate(names):
        x = 16 + at % columns * (width - 16) / columns
        y = HEIGHT + _LINE * (at // columns) + 6
        parts.append(_stroke([(x, y), (x + 22, y)], colours[name], dashed[name]))
        parts.append(f'<text x="{x + 28:.1f}" y="{y + 4:.1f}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: int, colours: dict[str, str]) -> list[str]:
    x0, x1 = left + _LEFT, left + WIDTH - _RIGHT
    y0, y1 = HEIGHT - _BOTTOM, _TOP
    ends = [x for curve in panel.curves for x, _ in curve.points] + list(panel.marks)
    low, high = (math.log2(end) if panel.doubles else end for end in (min(ends), max(ends)))

    def place(point: Point) -> Point:
        x = math.log2(point[0]) if panel.doubles else point[0]
        across = (x - low) / ((high - low) or 1.0)
        up = (point[1] - panel.low) / (panel.high - panel.low)
        return x0 + across * (x1 - x0), y0 - min(max(up, 0.0), 1.0) * (y0 - y1)

    parts = [
        f'<text class="title" x="{x0}" y="16">{escape(panel.title)}</text>',
        f'<text x="{x0}" y="32">{escape(panel.unit)}</text>',
        f'<text x="{(x0 + x1) / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(panel.axis)}</text>",
    ]
    for step in range(5):
        value = panel.low + (panel.high - panel.low) * step / 4
        y = place((panel.marks[0], value))[1]
        parts.append(f'<line class="grid" x1="{x0}" x2="{x1}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for mark in panel.marks:
        x = place((mark, panel.low))[0]
        parts.append(f'<text x="{x:.1f}" y="{y0 + 16}" text-anchor="middle">{mark:g}</text>')
    for curve in panel.curves:
        colour = colours[curve.name]
        places = [place(point) for point in curve.points]
        parts.append(_stroke(places, colour, curve.dashed))
        if curve.dashed or len(places) == 1:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
                f"<title>{escape(curve.name)}, {at:g}: {value:.4g}</title></circle>"
                for (x, y), (at, value) in zip(places, curve.points, strict=True)
            ]
    return parts


def _stroke(places: Sequence[Point], colour: str, dashed: bool) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{line}" stroke="{colour}"{dash}/>'
