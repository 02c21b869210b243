"""Timelines of schedules as charts of a page, planned timelines above measured ones. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fireflyer.charts import Box, timeline
from fireflyer.haiscale.pipeline.schedules import Kind, Span

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}


@dataclass(frozen=True)
class Drawing:
    """Timelines of one schedule, on one axis.

    Attributes:
        lines: computations by the name of their timeline, from top to bottom; times in seconds.
    """

    title: str
    lines: Mapping[str, Sequence[Span]]


def chart(drawing: Drawing) -> str:
    """Draws a schedule as an `<svg>` element for `fireflyer.charts.page`."""
    every = [span for spans in drawing.lines.values() for span in spans]
    ranks = 1 + max(span.rank for span in every)
    seen = {span.action.kind for span in every}
    return timeline(
        drawing.title,
        {_heading(name, spans): _boxes(spans, ranks) for name, spans in drawing.lines.items()},
        [f"rank {rank}" for rank in range(ranks)],
        {kind: f"{kind} = {name}" for kind, name in NAMES.items() if kind in seen},
        "number = micro-batch, ' = the rank's second stage",
    )


def _heading(name: str, spans: Sequence[Span]) -> str:
    end = max(span.end for span in spans)
    busy: dict[int, float] = {}
    for span in spans:
        busy[span.rank] = busy.get(span.rank, 0.0) + span.end - span.begin
    long = f"{end * 1e3:.0f} ms" if end < 10 else f"{end:.1f} s"
    return f"{name}: {long}, the busiest rank idle for {1 - max(busy.values()) / end:.1%}"


def _boxes(spans: Sequence[Span], ranks: int) -> list[Box]:
    boxes = []
    for span in spans:
        kind, stage, batch = span.action
        label = f"{kind}{batch}" + "'" * (stage // ranks)
        told = f"{NAMES[kind]} of micro-batch {batch}, stage {stage}"
        boxes.append(Box(span.rank, span.begin, span.end, kind, label, told))
    return boxes
