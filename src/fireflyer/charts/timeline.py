"""Timelines: boxes on lanes, in panels that share one axis of time.

Letters and pattern of a box show its kind, so a timeline needs no colour.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fireflyer.charts import svg
from fireflyer.charts.axes import ticks
from fireflyer.charts.svg import Markup

WIDTH, LEFT, LANE, GAP, AXIS = 960, 64, 24, 30, 26
LETTER = 6.6  # width of a character of a box's label

_HATCHES = ("M0 5L5 0", "M0 0L5 5", "M0 2.5H5", "M2.5 0V5")


@dataclass(frozen=True)
class Box:
    """Box on a lane.

    Attributes:
        lane: number of the lane, from 0.
        begin, end: seconds.
        kind: name of its kind, a key of the timeline's `kinds`.
        label: letters in the box; omitted if they do not fit.
        tip: text of the tooltip, before the times.
    """

    lane: int
    begin: float
    end: float
    kind: str
    label: str
    tip: str


def timeline(
    title: str, panels: Mapping[str, Sequence[Box]], lanes: Sequence[str],
    kinds: Mapping[str, str], note: str = "",
) -> Markup:  # fmt: skip
    """Draws panels of lanes below each other.

    Args:
        title: text above the panels.
        panels: boxes of each panel, by the text above the panel; at least one box in all.
        lanes: name of each lane.
        kinds: legend: the meaning of each kind of box. The first kind has no pattern.
        note: text after the legend.

    Returns:
        An `<svg>` element.

    Raises:
        ValueError: no panel has a box.
    """
    end = max((box.end for boxes in panels.values() for box in boxes), default=0.0)
    if end <= 0:
        raise ValueError(f"the timeline {title!r} has no box to show")
    key = f"p{zlib.crc32(title.encode()):x}"  # a page may have patterns of several timelines
    styles = {kind: _Style(index, key) for index, kind in enumerate(kinds)}
    panel = GAP + len(lanes) * LANE
    top, foot = 26, 26 + panel * len(panels)
    height = foot + AXIS + 26
    defined = [style.definition() for style in styles.values() if style.index]
    parts = [
        svg.element("defs", *defined),
        svg.text(title, 0, 16, kind="title"),
        *_axis(end, top, foot),
    ]
    for number, (name, boxes) in enumerate(panels.items()):
        parts += _panel(name, boxes, lanes, styles, top + number * panel, (WIDTH - LEFT - 10) / end)
    parts += _legend(kinds, styles, note, foot + AXIS)
    return svg.drawing(title, WIDTH, height, parts)


@dataclass(frozen=True)
class _Style:
    index: int
    key: str

    def definition(self) -> Markup:
        hatch = svg.element("path", class_="hatch", d=_HATCHES[(self.index - 1) % len(_HATCHES)])
        return svg.element(
            "pattern", hatch, id=f"{self.key}-{self.index}", width=5, height=5,
            patternUnits="userSpaceOnUse",
        )  # fmt: skip

    def drawn(self, x: float, y: float, size: tuple[float, float], tip: str | None) -> Markup:
        """Returns a rectangle in this style. All styles but the first draw a pattern over it."""
        box = svg.rect(x, y, *size, tip, class_=f"m{self.index % 6} span")
        if not self.index:
            return box
        return Markup(
            box + svg.rect(x, y, *size, class_="over", fill=f"url(#{self.key}-{self.index})")
        )


def _axis(end: float, top: int, foot: int) -> Iterator[Markup]:
    for value in ticks(0.0, end, 10):
        x = LEFT + value * (WIDTH - LEFT - 10) / end
        yield svg.line(x, top + GAP, x, foot + 4)
        yield svg.text(seconds(value, end), x, foot + 17, "middle")


def seconds(value: float, end: float) -> str:
    """Returns a time as text, in the unit that suits an axis of `end` seconds."""
    return f"{value * 1e3:g} ms" if end < 10 else f"{value:g} s"


def _panel(
    name: str, boxes: Sequence[Box], lanes: Sequence[str], styles: Mapping[str, _Style],
    top: int, scale: float,
) -> Iterator[Markup]:  # fmt: skip
    yield svg.text(name, 0, top + 20)
    for number, lane in enumerate(lanes):
        yield svg.text(lane, 0, top + GAP + number * LANE + 15)
    for box in boxes:
        x, y = LEFT + box.begin * scale, top + GAP + box.lane * LANE + 2
        width = max((box.end - box.begin) * scale, 0.5)
        tip = f"{box.tip}: {box.begin * 1e3:.1f} to {box.end * 1e3:.1f} ms"
        yield styles[box.kind].drawn(x, y, (width, LANE - 4), tip)
        if width > LETTER * len(box.label) + 3:
            yield svg.text(box.label, x + width / 2, y + 14, "middle", "over")


def _legend(
    kinds: Mapping[str, str], styles: Mapping[str, _Style], note: str, top: int
) -> Iterator[Markup]:
    x = LEFT
    for kind, meaning in kinds.items():
        yield styles[kind].drawn(x, top + 4, (22, 14), None)
        yield svg.text(meaning, x + 28, top + 15)
        x += 50 + round(LETTER * len(meaning))
    yield svg.text(note, x, top + 15)
