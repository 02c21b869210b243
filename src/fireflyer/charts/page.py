"""HTML page of sections with text, tables and charts. The page loads no other files."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root{--paper:#fff;--ink:#1b1f24;--soft:#59636e;--rule:#d6dbe1;--hue:#1f5fbf;
--c0:#1f5fbf;--c1:#b3471b;--c2:#2c7a3f;--c3:#7a3fa0;--c4:#8a6d00;--c5:#0b7285}
@media (prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e8eaed;--soft:#a2abb5;--rule:#353b42;
--hue:#74a9ff;--c0:#74a9ff;--c1:#ff9d70;--c2:#7fd493;--c3:#cf9bf2;--c4:#e3c55a;--c5:#6fd3e6}}
body{background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;margin:0 auto;
padding:16px;max-width:60rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}p{max-width:45rem}
.scroll{overflow-x:auto}table{border-collapse:collapse}
th,td{text-align:right;padding:4px 12px;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:600}
svg.chart{width:100%;height:auto;display:block;margin:12px 0}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}
svg .title{fill:var(--ink);font-weight:600;font-size:13px}svg .grid{stroke:var(--rule)}
svg path{fill:none;stroke:var(--soft);stroke-width:1.8}svg .cell{fill:var(--hue)}
svg .mark{fill:var(--ink);font-weight:700}svg .on{fill:var(--paper)}
svg .box{fill:none;stroke:var(--ink)}svg rect.span{fill-opacity:.3;stroke:var(--soft);stroke-width:.8}
svg path.hatch{stroke:var(--soft);stroke-width:.7;opacity:.6}
svg .over{pointer-events:none}svg text.over{fill:var(--ink);font-size:11px}
""" + "".join(
    f"svg .s{n}{{stroke:var(--c{n})}}svg .m{n}{{fill:var(--c{n});stroke:none}}" for n in range(6)
)


@dataclass(frozen=True)
class Section:
    """Section of a page: a heading, plain paragraphs, and finished HTML or SVG parts."""

    heading: str
    text: Sequence[str] = ()
    parts: Sequence[str] = ()


def page(title: str, sections: Sequence[Section]) -> str:
    """Returns an HTML document. Headings and text are escaped; parts are not."""
    body = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        body.append(f"<h2>{escape(section.heading)}</h2>")
        body += [f"<p>{escape(line)}</p>" for line in section.text]
        body += section.parts
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table of texts and numbers; the first column is left-aligned."""
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    lines = ["".join(f"<td>{escape(_text(cell))}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return "" if cell is None else str(cell)
