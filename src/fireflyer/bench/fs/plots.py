"""Curves as SVG text: one panel per measure, side by side, over the same logarithmic axis."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 300, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 44, 44
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#57606a}.title{font-weight:600;fill:#24292f}"
    ".grid{stroke:#d0d7de}.curve{fill:none;stroke:#0969da;stroke-width:2}.dot{fill:#0969da}"
)


class Panel(NamedTuple):
    """Curve of one measure.

    Attributes:
        points: (amount, figure), in order; at least one point, all values above 0.
    """

    title: str
    unit: str
    points: Sequence[tuple[float, float]]


def draw(axis: str, label: Callable[[float], str], panels: Sequence[Panel]) -> str:
    """Returns the text of an SVG file.

    Args:
        axis: title of the horizontal axis.
        label: formats a value of that axis.
    """
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img">',
        f"<title>{escape(', '.join(panel.title for panel in panels))} against {escape(axis)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, index * WIDTH, axis, label)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: int, axis: str, label: Callable[[float], str]) -> list[str]:
    low, high = panel.points[0][0], panel.points[-1][0]
    top = _round_up(max(value for _, value in panel.points))
    x0, x1 = left + _LEFT, left + WIDTH - _RIGHT
    y0, y1 = HEIGHT - _BOTTOM, _TOP

    def across(at: float) -> float:
        span = math.log(high / low) or 1.0
        return x0 + math.log(at / low) / span * (x1 - x0)

    def up(value: float) -> float:
        return y0 - value / top * (y0 - y1)

    parts = [
        f'<text class="title" x="{x0}" y="16">{escape(panel.title)}</text>',
        f'<text x="{x0}" y="31">{escape(panel.unit)}</text>',
        f'<text x="{(x0 + x1) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(axis)}</text>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = up(top * share)
        parts.append(f'<line class="grid" x1="{x0}" x2="{x1}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = f"{top * share:,.4g}" if top < 1e4 else f"{top * share / 1e3:,.4g}k"
        parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    places = [(across(at), up(value)) for at, value in panel.points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts.append(f'<polyline class="curve" points="{line}"/>')
    for (x, y), (at, value) in zip(places, panel.points, strict=True):
        told = f"{label(at)}: {value:,.4g} {panel.unit}"
        dot = f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3">'
        parts.append(f"{dot}<title>{escape(told)}</title></circle>")
        short = f'<text x="{x:.1f}" y="{y0 + 16}" text-anchor="middle">{_short(at)}</text>'
        parts.append(short)
    return parts


def _short(value: float) -> str:
    """Returns a short form of the value: 10k, 100M, 1."""
    for size, unit in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    for size, unit in ((10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _round_up(value: float) -> float:
    """Rounds up to 1, 2, 5 or 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * 0.999)
