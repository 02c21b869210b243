"""Draws the report's chart as SVG text: loss, tokens/s and communication share over time."""

import math
from collections.abc import Sequence
from html import escape

import msgspec

from fireflyer.charts.axes import ticks
from fireflyer.demo.figures import Figures
from fireflyer.demo.metrics import MetricsRecord
from fireflyer.demo.story import Kill, Story, Suspend

WIDTH = 920
LEFT = 58
RIGHT = 16
POINTS = 400
"""Maximum number of points in one curve of one attempt."""

Point = tuple[float, float]


class Panel(msgspec.Struct, frozen=True):
    """Plot area: x from `x0` to `x1` over the chart's width, y from `y0` (bottom) to `y1` (top)."""

    top: float
    height: float
    x0: float
    x1: float
    y0: float
    y1: float

    def at(self, x: float, y: float) -> Point:
        """Returns the drawing coordinates of a value, clamped to the area."""
        across = (x - self.x0) / ((self.x1 - self.x0) or 1.0)
        up = (y - self.y0) / ((self.y1 - self.y0) or 1.0)
        left = LEFT + min(max(across, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)
        return left, self.top + (1 - min(max(up, 0.0), 1.0)) * self.height


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Returns the exponential moving average, without bias towards the start."""
    total, norm, out = 0.0, 0.0, []
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def thin(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """Returns at most about `most` points: each is the mean of a run of points of equal length."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def draw(story: Story, figures: Figures) -> str:
    """Draws the chart of a run that has at least one line."""
    lines = story.lines
    origin = lines[0].monotonic - lines[0].step_s
    end = max(lines[-1].monotonic - origin, 1e-3)
    low = min(line.loss for line in lines)
    high = max(line.loss for line in lines)
    loss = Panel(40, 270, 0, end, math.floor(low * 2) / 2, math.ceil(high * 2) / 2)
    rates = sorted(line.tokens / line.step_s for line in lines)
    usual = rates[int(0.98 * (len(rates) - 1))]  # a single outlier step must not flatten the curve
    speed = Panel(364, 74, 0, end, 0, _round_up(usual * 1.1))
    shares = smooth([line.comm_s / line.step_s for line in lines])
    comm = Panel(488, 74, 0, end, 0, min(1.0, max(0.1, math.ceil(max(shares) * 10) / 10)))
    by_attempt = _attempts(lines)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} 600" role="img" aria-labelledby="chart-title">',
        f'<title id="chart-title">{escape(_summary(figures))}</title>',
        *_gaps(story, origin, loss, comm),
        *_frame(loss, "loss, nats a token", [f"{v:g}" for v in ticks(loss.y0, loss.y1, 6)], 6),
        *_frame(speed, "tokens/s", [f"{v:,.0f}" for v in ticks(0, speed.y1, 3)], 3),
        *_frame(comm, "share of the step in communication", _percents(comm), 2),
        *_seconds(comm, end),
    ]
    for group in by_attempt:
        times = [line.monotonic - origin for line in group]
        raw = [line.loss for line in group]
        parts.append(_curve(loss, times, raw, "raw"))
        parts.append(_curve(loss, times, smooth(raw), "loss"))
        rate = smooth([line.tokens / line.step_s for line in group])
        parts.append(_area(speed, times, rate, "speed"))
        share = smooth([line.comm_s / line.step_s for line in group])
        parts.append(_area(comm, times, share, "comm"))
    parts += _checkpoints(lines, origin, loss)
    parts += _marks(story, origin, loss, comm)
    return "\n".join([*parts, "</svg>"])


def _summary(figures: Figures) -> str:
    return (
        f"Loss from {figures.loss_start:.2f} to {figures.loss_end:.2f} over {figures.steps} steps, "
        "with one killed rank, one suspend and one resume"
    )


def _round_up(value: float) -> float:
    step = 10.0 ** math.floor(math.log10(max(value, 1e-9))) / 2
    return math.ceil(value / step) * step


def _percents(panel: Panel) -> list[str]:
    return [f"{value:.0%}" for value in ticks(panel.y0, panel.y1, 2)]


def _attempts(lines: Sequence[MetricsRecord]) -> list[list[MetricsRecord]]:
    groups: list[list[MetricsRecord]] = []
    for line in lines:
        if not groups or groups[-1][-1].attempt != line.attempt:
            groups.append([])
        groups[-1].append(line)
    return groups


def _frame(panel: Panel, title: str, labels: list[str], about: int) -> list[str]:
    """Draws the labelled grid lines and the panel's title above it."""
    out = [f'<text class="title" x="{LEFT}" y="{panel.top - 10:.0f}">{escape(title)}</text>']
    for value, label in zip(ticks(panel.y0, panel.y1, about), labels, strict=True):
        _, y = panel.at(0, value)
        out.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        out.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    return out


def _seconds(panel: Panel, end: float) -> list[str]:
    out = []
    for value in ticks(0, end, 10):
        x, y = panel.at(value, panel.y0)
        out.append(
            f'<text class="tick" x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{value:g} s</text>'
        )
    return out


def _curve(panel: Panel, xs: list[float], ys: list[float], kind: str) -> str:
    points = [panel.at(x, y) for x, y in thin(list(zip(xs, ys, strict=True)))]
    return f'<polyline class="curve {kind}" points="{_join(points)}"/>'


def _area(panel: Panel, xs: list[float], ys: list[float], kind: str) -> str:
    points = [panel.at(x, y) for x, y in thin(list(zip(xs, ys, strict=True)))]
    bottom = panel.top + panel.height
    closed = [(points[0][0], bottom), *points, (points[-1][0], bottom)]
    return (
        f'<polygon class="area {kind}" points="{_join(closed)}"/>'
        f'<polyline class="curve {kind}" points="{_join(points)}"/>'
    )


def _join(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _checkpoints(lines: Sequence[MetricsRecord], origin: float, panel: Panel) -> list[str]:
    """Draws a small mark at the foot of the loss panel for each save."""
    out = []
    for line in lines:
        if line.checkpoint_stall_s is not None:
            x, y = panel.at(line.monotonic - origin, panel.y0)
            stall = f"{line.checkpoint_stall_s * 1e3:.1f} ms"
            told = f"checkpoint at step {line.step}, blocked the step for {stall}"
            out.append(
                f'<circle class="save" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{told}</title></circle>'
            )
    return out


class Break(msgspec.Struct, frozen=True):
    """Interruption of the training; times are CLOCK_MONOTONIC."""

    kind: str
    """"kill" or "suspend"; also a class of the style sheet."""
    at: float
    back: float | None
    """Time of the first step that finishes after the interruption."""
    label: tuple[str, str]


def breaks(story: Story) -> list[Break]:
    """Returns the interruptions in order."""
    out = []
    for deed in story.deeds:
        after = (line.monotonic for line in story.lines if line.attempt > deed.attempt)
        back = next(after, None)
        took = "" if back is None else f"{back - deed.at:.2f} s"
        if isinstance(deed.action, Kill):
            label = (f"rank {deed.action.rank} killed", took and f"training again in {took}")
            out.append(Break("kill", deed.at, back, label))
        elif isinstance(deed.action, Suspend):
            label = ("suspended, then resumed", took and f"training again in {took}")
            out.append(Break("suspend", deed.at, back, label))
    return out


def _gaps(story: Story, origin: float, upper: Panel, lower: Panel) -> list[str]:
    out = []
    for gap in breaks(story):
        x, _ = upper.at(gap.at - origin, 0)
        x2, _ = upper.at((gap.at if gap.back is None else gap.back) - origin, 0)
        height = lower.top + lower.height - upper.top
        out.append(
            f'<rect class="gap {gap.kind}" x="{x:.1f}" y="{upper.top}" width="{max(x2 - x, 1):.1f}" '
            f'height="{height:.0f}"><title>{escape(", ".join(gap.label))}</title></rect>'
        )
    return out


def _marks(story: Story, origin: float, upper: Panel, lower: Panel) -> list[str]:
    """Draws a vertical line at each interruption and each return, labelled at the top."""
    out = []
    foot = lower.top + lower.height
    for gap in breaks(story):
        for style, moment in ((gap.kind, gap.at), ("back", gap.back)):
            if moment is not None:
                x, _ = upper.at(moment - origin, 0)
                at = f'x1="{x:.1f}" x2="{x:.1f}" y1="{upper.top}" y2="{foot:.0f}"'
                out.append(f'<line class="mark {style}" {at}/>')
        x, _ = upper.at((gap.at if gap.back is None else gap.back) - origin, 0)
        anchor, x = ("start", x + 9)
        if x > WIDTH * 0.8:
            x, _ = upper.at(gap.at - origin, 0)
            anchor, x = "end", x - 9
        for row, text in enumerate(gap.label):
            style = f"label {gap.kind}" if row == 0 else "label"
            at = f'x="{x:.1f}" y="{upper.top + 18 + 18 * row}" text-anchor="{anchor}"'
            out.append(f'<text class="{style}" {at}>{escape(text)}</text>')
    return out
