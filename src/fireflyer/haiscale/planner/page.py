"""One HTML page with the timelines of schedules, planned above measured. Pure; no script, no link.

Each box is a computation: its letter and pattern say which kind, its number the micro-batch, so the
page needs no colour. Colours follow the reader's light or dark setting.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fireflyer.charts.axes import ticks
from fireflyer.haiscale.pipeline.schedules import Kind, Span

WIDTH, LEFT, LANE, GAP, AXIS = 1080, 64, 24, 30, 26
LETTER = 6.2  # width of a character of a box's label

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5b6472; --line: #d8dde5; --page: #fff;
  --card: #f6f8fa; --F: #dbe7fd; --B: #ffd9b8; --I: #ffd9b8; --W: #cfeadf; --edge: #5b6472 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa4b2; --line: #343b46;
  --page: #14171c; --card: #1c2128; --F: #24406f; --B: #70401b; --I: #70401b; --W: #1c5a45;
  --edge: #9aa4b2 } }
body { margin: 0 auto; padding: 16px; max-width: 1120px; background: var(--page); color: var(--ink);
  font: 16px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: .2em 0 }
h2 { font-size: 1.05rem; margin: 0 0 .4em }
p { margin: .3em 0 .8em; color: var(--soft) }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  margin: 14px 0; overflow-x: auto }
svg { display: block; width: 100%; min-width: 720px; height: auto }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif }
svg .soft { fill: var(--soft) }
.grid { stroke: var(--line) }
.box { stroke: var(--edge); stroke-width: .8 }
.F { fill: var(--F) } .B { fill: var(--B) } .I { fill: var(--I) } .W { fill: var(--W) }
.over { pointer-events: none }
.ink { stroke: var(--edge); stroke-width: .7; fill: none } .dot { fill: var(--edge) }
table { border-collapse: collapse; font-size: .95rem }
td, th { padding: 3px 14px 3px 0; text-align: left; border-bottom: 1px solid var(--line) }
td { vertical-align: top; font-variant-numeric: tabular-nums }
"""

_PATTERNS = (
    '<svg width="0" height="0" style="position:absolute;min-width:0" aria-hidden="true"><defs>'
    '<pattern id="p-B" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<path class="ink" d="M0 5L5 0"/></pattern>'
    '<pattern id="p-I" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<path class="ink" d="M0 0L5 5"/></pattern>'
    '<pattern id="p-W" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<circle class="dot" cx="2.5" cy="2.5" r=".8"/></pattern></defs></svg>'
)


@dataclass(frozen=True)
class Drawing:
    """Timelines of one schedule, on one axis.

    Attributes:
        lines: computations by the name of the timeline, from above; times in seconds.
    """

    title: str
    lines: Mapping[str, Sequence[Span]]


def page(title: str, lead: str, facts: Mapping[str, str], drawings: Sequence[Drawing]) -> str:
    """Returns the page's HTML.

    Args:
        lead: sentence below the title.
        facts: rows of a table above the drawings.
    """
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{_PATTERNS}",
        f"<h1>{escape(title)}</h1><p>{escape(lead)}</p>",
    ]
    if facts:
        rows = (f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in facts.items())
        parts.append(f"<section><table>{''.join(rows)}</table></section>")
    parts += [f"<section><h2>{escape(d.title)}</h2>{_svg(d)}</section>" for d in drawings]
    return "\n".join([*parts, "</body></html>", ""])


def _svg(drawing: Drawing) -> str:
    end = max(span.end for spans in drawing.lines.values() for span in spans)
    ranks = 1 + max(span.rank for spans in drawing.lines.values() for span in spans)
    panel = GAP + ranks * LANE
    height = panel * len(drawing.lines) + AXIS + 26
    scale = (WIDTH - LEFT - 10) / end
    parts = []
    foot = panel * len(drawing.lines)
    for value in ticks(0.0, end, 10):
        x = LEFT + value * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{GAP}" y2="{foot + 4}"/>')
        text = f"{value * 1e3:g} ms" if end < 10 else f"{value:g} s"
        parts.append(
            f'<text class="soft" x="{x:.1f}" y="{foot + 17}" text-anchor="middle">{text}</text>'
        )
    for number, (name, spans) in enumerate(drawing.lines.items()):
        parts += _panel(name, spans, ranks, number * panel, scale)
    kinds = [k for k in NAMES if any(s.action.kind is k for v in drawing.lines.values() for s in v)]
    parts += _legend(kinds, foot + AXIS)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(drawing.title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _panel(name: str, spans: Sequence[Span], ranks: int, top: int, scale: float) -> Iterator[str]:
    end = max(span.end for span in spans)
    busy = [0.0] * ranks
    for span in spans:
        busy[span.rank] += span.end - span.begin
    idle = 1 - max(busy) / end
    long = f"{end * 1e3:.0f} ms" if end < 10 else f"{end:.1f} s"
    yield (
        f'<text x="0" y="{top + 20}"><tspan font-weight="600">{escape(name)}</tspan> {long}, '
        f"the busiest rank idle for {idle:.1%}</text>"
    )
    for rank in range(ranks):
        y = top + GAP + rank * LANE
        yield f'<text class="soft" x="0" y="{y + 15}">rank {rank}</text>'
    for span in spans:
        kind, stage, batch = span.action
        x, y = LEFT + span.begin * scale, top + GAP + span.rank * LANE + 2
        width = max((span.end - span.begin) * scale, 0.5)
        at = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 4}"'
        told = f"{NAMES[kind]} of micro-batch {batch}, stage {stage}"
        yield (
            f'<rect class="box {kind}" {at}><title>{told}: {span.begin * 1e3:.1f} to '
            f"{span.end * 1e3:.1f} ms</title></rect>"
        )
        if kind is not Kind.FORWARD:
            yield f'<rect class="over" {at} fill="url(#p-{kind})" opacity=".45"/>'
        label = f"{kind}{batch}" + "'" * (stage // ranks)
        if width > LETTER * len(label) + 3:
            yield (
                f'<text class="over" x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle">'
                f"{label}</text>"
            )


def _legend(kinds: Sequence[Kind], top: int) -> Iterator[str]:
    x = LEFT
    for kind in kinds:
        at = f'x="{x}" y="{top + 4}" width="22" height="14"'
        yield f'<rect class="box {kind}" {at}/>'
        if kind is not Kind.FORWARD:
            yield f'<rect {at} fill="url(#p-{kind})" opacity=".45"/>'
        yield f'<text x="{x + 28}" y="{top + 15}">{kind} = {NAMES[kind]}</text>'
        x += 150
    yield (
        f'<text class="soft" x="{x}" y="{top + 15}">number = micro-batch, \' = the rank\'s second '
        "stage</text>"
    )
