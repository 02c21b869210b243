"""Timelines: boxes on lanes, in panels that share one axis of time.

Letters and pattern of a box show its kind, so a timeline needs no colour.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fireflyer.charts.axes import ticks

WIDTH, LEFT, LANE, GAP, AXIS = 960, 64, 24, 30, 26
LETTER = 6.6  # width of a character of a box's label

_PATTERNS = (
    '<path class="hatch" d="M0 5L5 0"/>',
    '<path class="hatch" d="M0 0L5 5"/>',
    '<path class="hatch" d="M0 2.5H5"/>',
    '<path class="hatch" d="M2.5 0V5"/>',
)


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
) -> str:  # fmt: skip
    """Draws panels of lanes below each other.

    Args:
        title: text above the panels.
        panels: boxes by the text above them; at least one box.
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
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        "<defs>",
        *(style.definition() for style in styles.values() if style.index),
        "</defs>",
        f'<text class="title" x="0" y="16">{escape(title)}</text>',
        *_axis(end, top, foot),
    ]
    for number, (name, boxes) in enumerate(panels.items()):
        parts += _panel(name, boxes, lanes, styles, top + number * panel, (WIDTH - LEFT - 10) / end)
    parts += _legend(kinds, styles, note, foot + AXIS)
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Style:
    index: int
    key: str

    def definition(self) -> str:
        mark = _PATTERNS[(self.index - 1) % len(_PATTERNS)]
        name = f'id="{self.key}-{self.index}"'
        return (
            f'<pattern {name} width="5" height="5" patternUnits="userSpaceOnUse">{mark}</pattern>'
        )

    def drawn(self, at: str, inside: str = "") -> str:
        """Returns a rectangle in this style, with a pattern above it."""
        box = f'<rect class="m{self.index % 6} span" {at}>{inside}</rect>'
        if not self.index:
            return box
        return f'{box}<rect class="over" {at} fill="url(#{self.key}-{self.index})"/>'


def _axis(end: float, top: int, foot: int) -> Iterator[str]:
    for value in ticks(0.0, end, 10):
        x = LEFT + value * (WIDTH - LEFT - 10) / end
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top + GAP}" y2="{foot + 4}"/>'
        yield (
            f'<text x="{x:.1f}" y="{foot + 17}" text-anchor="middle">{seconds(value, end)}</text>'
        )


def seconds(value: float, end: float) -> str:
    """Returns a time as text, in the unit that suits an axis of `end` seconds."""
    return f"{value * 1e3:g} ms" if end < 10 else f"{value:g} s"


def _panel(
    name: str, boxes: Sequence[Box], lanes: Sequence[str], styles: Mapping[str, _Style],
    top: int, scale: float,
) -> Iterator[str]:  # fmt: skip
    yield f'<text x="0" y="{top + 20}">{escape(name)}</text>'
    for number, lane in enumerate(lanes):
        yield f'<text x="0" y="{top + GAP + number * LANE + 15}">{escape(lane)}</text>'
    for box in boxes:
        x, y = LEFT + box.begin * scale, top + GAP + box.lane * LANE + 2
        width = max((box.end - box.begin) * scale, 0.5)
        at = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 4}"'
        tip = f"{box.tip}: {box.begin * 1e3:.1f} to {box.end * 1e3:.1f} ms"
        yield styles[box.kind].drawn(at, f"<title>{escape(tip)}</title>")
        if width > LETTER * len(box.label) + 3:
            yield (
                f'<text class="over" x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle">'
                f"{escape(box.label)}</text>"
            )


def _legend(
    kinds: Mapping[str, str], styles: Mapping[str, _Style], note: str, top: int
) -> Iterator[str]:
    x = LEFT
    for kind, meaning in kinds.items():
        yield styles[kind].drawn(f'x="{x}" y="{top + 4}" width="22" height="14"')
        yield f'<text x="{x + 28}" y="{top + 15}">{escape(meaning)}</text>'
        x += 50 + round(LETTER * len(meaning))
    yield f'<text x="{x}" y="{top + 15}">{escape(note)}</text>'
