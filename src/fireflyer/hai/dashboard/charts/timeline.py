"""Draws a task's time as bars in percent of the width: one row for the task, one per attempt.
Pure."""

from collections.abc import Iterable, Sequence

import msgspec

from fireflyer.hai.dashboard import text_filters
from fireflyer.hai.ledger import Cause, Segment
from fireflyer.hai.model import Event

MOST_BARS = 400
"""Maximum number of bars. If there are more segments, each bar shows the cause with the largest
share of its time."""

ATTEMPTS = 30
"""Maximum number of attempts shown; older attempts are left out."""

MARKS = 200

_TICKS_S = (
    1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 3 * 3600, 6 * 3600, 12 * 3600,
    86_400, 2 * 86_400, 7 * 86_400, 14 * 86_400, 28 * 86_400,
)  # fmt: skip


class Bar(msgspec.Struct, frozen=True):
    """Bar of one time span."""

    x: float
    width: float
    cause: Cause
    title: str


class Mark(msgspec.Struct, frozen=True):
    """Mark of one moment."""

    x: float
    kind: str
    """Kind: suspend, resume, fault or stop."""
    title: str


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt."""

    number: int
    nodes: tuple[str, ...]
    begin: float
    end: float | None
    """None: the attempt runs."""
    outcome: str
    reason: str
    bars: tuple[Bar, ...]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """A task from its submission to its end or now."""

    begin: float
    end: float
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    ticks: tuple[tuple[float, str], ...]
    """Positions, and times since the submission."""
    runs: tuple[Run, ...]
    """Attempts, newest first."""
    left_out: int
    """Number of older attempts that are not shown."""
    causes: tuple[Cause, ...]
    """Causes that appear in the bars."""


class _Scale:
    def __init__(self, begin: float, end: float) -> None:
        self._begin = begin
        self._each = 100 / max(end - begin, 1e-3)

    def __call__(self, wall: float) -> float:
        return round(min(max((wall - self._begin) * self._each, 0.0), 100.0), 2)


def timeline(events: Sequence[Event], segments: Sequence[Segment], now: float) -> Timeline | None:
    """Computes the drawing; None before the first event.

    Args:
        events: events of the task, in order.
        segments: the ledger's segments of the same events.
        now: wall clock.
    """
    if not events:
        return None
    begin = events[0].wall
    end = max(segments[-1].end / 1e6 if segments else begin, events[-1].wall)
    scale = _Scale(begin, end)
    runs = _runs(events, segments, scale)
    return Timeline(
        begin=begin, end=end, bars=_bars(segments, scale), marks=_marks(events, scale),
        ticks=_ticks(end - begin), runs=tuple(reversed(runs[-ATTEMPTS:])),
        left_out=max(0, len(runs) - ATTEMPTS),
        causes=tuple(dict.fromkeys(segment.cause for segment in segments)),
    )  # fmt: skip


def _bars(segments: Sequence[Segment], scale: _Scale) -> tuple[Bar, ...]:
    if len(segments) > MOST_BARS:
        segments = _coarse(segments)
    bars = []
    for segment in segments:
        begin, end = segment.begin / 1e6, segment.end / 1e6
        x = scale(begin)
        width = round(max(scale(end) - x, 0.2), 2)
        bars.append(
            Bar(x, width, segment.cause, f"{segment.cause}: {text_filters.span(end - begin)}")
        )
    return tuple(bars)


def _coarse(segments: Sequence[Segment]) -> list[Segment]:
    """Returns about MOST_BARS segments of equal length, each with the cause that has the largest
    share of its time."""
    first, last = segments[0].begin, segments[-1].end
    size = max((last - first) // MOST_BARS, 1)
    found = []
    at = 0
    for begin in range(first, last, size):
        end = min(begin + size, last)
        share: dict[Cause, int] = {}
        while at < len(segments) and segments[at].begin < end:
            segment = segments[at]
            part = min(segment.end, end) - max(segment.begin, begin)
            share[segment.cause] = share.get(segment.cause, 0) + part
            if segment.end > end:
                break
            at += 1
        if share:
            found.append(Segment(begin, end, max(share, key=lambda cause: share[cause])))
    return found


def _runs(events: Iterable[Event], segments: Sequence[Segment], scale: _Scale) -> list[Run]:
    runs: list[Run] = []
    begun: Event | None = None
    at = 0
    for event in events:
        if event.kind == "starting":
            begun = event
        elif event.kind == "gang_ended" and begun is not None:
            runs.append(_run(begun, event, segments, at, scale))
            begun, at = None, _after(segments, at, event.wall)
    if begun is not None:
        runs.append(_run(begun, None, segments, at, scale))
    return runs


def _after(segments: Sequence[Segment], at: int, wall: float) -> int:
    while at < len(segments) and segments[at].end <= wall * 1e6:
        at += 1
    return at


def _run(
    begun: Event, ended: Event | None, segments: Sequence[Segment], at: int, scale: _Scale
) -> Run:
    end = None if ended is None else ended.wall
    held = []
    for segment in segments[at:]:
        if end is not None and segment.begin >= end * 1e6:
            break
        if segment.held and segment.end > begun.wall * 1e6:
            held.append(segment)
    return Run(
        number=begun.attempt,
        nodes=tuple(map(str, begun.detail.get("nodes", ()))),
        begin=begun.wall,
        end=end,
        outcome="runs" if ended is None else str(ended.detail["outcome"]),
        reason="" if ended is None else str(ended.detail.get("reason", "")),
        bars=_bars(held, scale),
    )


def _marks(events: Iterable[Event], scale: _Scale) -> tuple[Mark, ...]:
    found = []
    for event in events:
        detail = event.detail
        match event.kind:
            case "suspending":
                preempted = bool(detail.get("preempted"))
                title = "preempted for other tasks" if preempted else "suspend requested"
                found.append(Mark(scale(event.wall), "suspend", title))
            case "resumed":
                found.append(Mark(scale(event.wall), "resume", "resumed"))
            case "stopping":
                found.append(Mark(scale(event.wall), "stop", "stop requested"))
            case "observed" if not detail.get("passed"):
                title = text_filters.short(str(detail.get("text", "a fault")), text_filters.TEXT)
                found.append(Mark(scale(event.wall), "fault", title))
            case "gang_ended" if detail["outcome"] in ("failed", "lost"):
                title = text_filters.short(str(detail.get("reason", "")), text_filters.TEXT)
                found.append(Mark(scale(event.wall), "fault", f"{detail['outcome']}: {title}"))
    return tuple(found[-MARKS:])


def _ticks(length: float) -> tuple[tuple[float, str], ...]:
    step = next((step for step in _TICKS_S if length / step <= 4), max(length / 4, 1.0))
    count = int(length / step)
    each = 100 * step / max(length, 1e-3)
    return tuple(
        (round(number * each, 2), text_filters.span(number * step))
        for number in range(1, count + 1)
    )
