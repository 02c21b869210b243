"""Draws the report's chart as SVG text: loss, tokens/s and communication share over time."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from fireflyer.charts import axes, svg
from fireflyer.charts.axes import Scale
from fireflyer.charts.svg import Markup, Point
from fireflyer.demo.figures import Figures
from fireflyer.demo.metrics import MetricsRecord
from fireflyer.demo.story import Kill, Story, Suspend

WIDTH = 920
LEFT = 58
RIGHT = 16
POINTS = 400
"""Maximum number of points in one curve of one attempt."""

HEIGHT = 600


class Panel(NamedTuple):
    """Plot area: a scale `x` over the chart's width, and a scale `y` from the panel's bottom to its
    top."""

    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> Point:
        """Returns the drawing coordinates of a value, clamped to the area."""
        return self.x.at(x), self.y.at(y)


def panel(seconds: float, low: float, high: float, top: float, height: float) -> Panel:
    """Returns the panel of values from `low` to `high` over all seconds of the run."""
    across = Scale(0.0, seconds, LEFT, WIDTH - RIGHT, False)
    return Panel(across, Scale(low, high, top + height, top, False))


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Returns the exponential moving average, corrected for the bias of the first values."""
    total, norm, out = 0.0, 0.0, []
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def thin(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """Returns at most `most` points; each is the mean of equally many consecutive points, except
    that the last may be the mean of fewer."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def draw(story: Story, figures: Figures) -> Markup:
    """Draws the chart of a run that has at least one metrics record."""
    lines = story.lines
    origin = lines[0].monotonic - lines[0].step_s
    end = max(lines[-1].monotonic - origin, 1e-3)
    low = min(line.loss for line in lines)
    high = max(line.loss for line in lines)
    loss = panel(end, math.floor(low * 2) / 2, math.ceil(high * 2) / 2, 40, 270)
    rates = sorted(line.tokens / line.step_s for line in lines)
    usual = rates[int(0.98 * (len(rates) - 1))]  # a single outlier step must not flatten the curve
    speed = panel(end, 0, _round_up(usual * 1.1), 364, 74)
    shares = smooth([line.comm_s / line.step_s for line in lines])
    comm = panel(end, 0, min(1.0, max(0.1, math.ceil(max(shares) * 10) / 10)), 488, 74)
    parts = [
        *_gaps(story, origin, loss, comm),
        *_frame(loss, "loss, nats a token", "{:g}".format, 6),
        *_frame(speed, "tokens/s", "{:,.0f}".format, 3),
        *_frame(comm, "share of the step in communication", "{:.0%}".format, 2),
        *axes.columns(comm.x, comm.y.start, "{:g} s".format, 10),
    ]
    for group in _attempts(lines):
        times = [line.monotonic - origin for line in group]
        raw = [line.loss for line in group]
        parts.append(_curve(loss, times, raw, "raw"))
        parts.append(_curve(loss, times, smooth(raw), "loss"))
        rate = smooth([line.tokens / line.step_s for line in group])
        parts += _area(speed, times, rate, "speed")
        share = smooth([line.comm_s / line.step_s for line in group])
        parts += _area(comm, times, share, "comm")
    parts += _checkpoints(lines, origin, loss)
    parts += _marks(story, origin, loss, comm)
    return svg.drawing(_summary(figures), WIDTH, HEIGHT, parts)


def _summary(figures: Figures) -> str:
    return (
        f"Loss from {figures.loss_start:.2f} to {figures.loss_end:.2f} over {figures.steps} steps, "
        "with one killed rank, one suspend and one resume"
    )


def _round_up(value: float) -> float:
    step = 10.0 ** math.floor(math.log10(max(value, 1e-9))) / 2
    return math.ceil(value / step) * step


def _attempts(lines: Sequence[MetricsRecord]) -> list[list[MetricsRecord]]:
    groups: list[list[MetricsRecord]] = []
    for line in lines:
        if not groups or groups[-1][-1].attempt != line.attempt:
            groups.append([])
        groups[-1].append(line)
    return groups


def _frame(panel: Panel, title: str, form: Callable[[float], str], about: int) -> list[Markup]:
    """Draws the labelled grid lines, and the panel's title above the panel."""
    heading = svg.text(title, LEFT, panel.y.end - 10, kind="title")
    return [heading, *axes.rows(panel.y, LEFT, WIDTH - RIGHT, form, about)]


def _places(panel: Panel, xs: list[float], ys: list[float]) -> list[Point]:
    return [panel.at(x, y) for x, y in thin(list(zip(xs, ys, strict=True)))]


def _curve(panel: Panel, xs: list[float], ys: list[float], kind: str) -> Markup:
    points = svg.joined(_places(panel, xs, ys))
    return svg.element("polyline", class_=f"curve {kind}", points=points)


def _area(panel: Panel, xs: list[float], ys: list[float], kind: str) -> list[Markup]:
    points = _places(panel, xs, ys)
    bottom = panel.y.start
    closed = svg.joined([(points[0][0], bottom), *points, (points[-1][0], bottom)])
    return [
        svg.element("polygon", class_=f"area {kind}", points=closed),
        _curve(panel, xs, ys, kind),
    ]


def _checkpoints(lines: Sequence[MetricsRecord], origin: float, panel: Panel) -> list[Markup]:
    """Draws a small mark at the foot of the loss panel for each save."""
    out = []
    for line in lines:
        if line.checkpoint_stall_s is not None:
            stall = f"{line.checkpoint_stall_s * 1e3:.1f} ms"
            tip = f"checkpoint at step {line.step}, blocked the step for {stall}"
            x = panel.x.at(line.monotonic - origin)
            out.append(svg.circle(x, panel.y.start, 3, tip, class_="save"))
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
    for done in story.completed:
        after = (line.monotonic for line in story.lines if line.attempt > done.attempt)
        back = next(after, None)
        took = "" if back is None else f"{back - done.at:.2f} s"
        if isinstance(done.action, Kill):
            label = (f"rank {done.action.rank} killed", took and f"training again in {took}")
            out.append(Break("kill", done.at, back, label))
        elif isinstance(done.action, Suspend):
            label = ("suspended, then resumed", took and f"training again in {took}")
            out.append(Break("suspend", done.at, back, label))
    return out


def _span(gap: Break, origin: float, panel: Panel) -> tuple[float, float]:
    """Returns the drawing's x coordinates of the begin and the end of an interruption."""
    back = gap.at if gap.back is None else gap.back
    return panel.x.at(gap.at - origin), panel.x.at(back - origin)


def _gaps(story: Story, origin: float, upper: Panel, lower: Panel) -> list[Markup]:
    out = []
    top, foot = upper.y.end, lower.y.start
    for gap in breaks(story):
        left, right = _span(gap, origin, upper)
        tip = ", ".join(gap.label)
        kind = f"gap {gap.kind}"
        out.append(svg.rect(left, top, max(right - left, 1), foot - top, tip, class_=kind))
    return out


def _marks(story: Story, origin: float, upper: Panel, lower: Panel) -> list[Markup]:
    """Draws a vertical line where each interruption begins and ends; the labels do not overlap."""
    out = []
    top, foot = upper.y.end, lower.y.start
    for number, gap in enumerate(breaks(story)):
        left, right = _span(gap, origin, upper)
        out.append(svg.line(left, top, left, foot, f"mark {gap.kind}"))
        if gap.back is not None:
            out.append(svg.line(right, top, right, foot, "mark back"))
        anchor, x = ("end", left - 9) if right + 9 > WIDTH * 0.8 else ("start", right + 9)
        for row, words in enumerate(gap.label):
            kind = f"label {gap.kind}" if row == 0 else "label"
            out.append(svg.text(words, x, top + 18 + 18 * row + 44 * number, anchor, kind))
    return out
