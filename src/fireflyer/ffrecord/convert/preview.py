"""HTML preview of record files: self-contained, without scripts, for light and dark screens.

Images are shown from their stored bytes, JPEG and PNG as data: URIs; nothing is decoded here. All
data from the files is escaped.
"""

import base64
import codecs
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from fireflyer.ffrecord.convert.formats.records import RecordSource, file_names, lengths
from fireflyer.ffrecord.convert.source import Row, as_array
from fireflyer.ffrecord.convert.statistics import (
    columns_text,
    describe_file,
    histogram,
    of_lengths,
    size_text,
    some_lengths,
)

SHOWN = 60
"""Default number of samples on a page."""
LONGEST_IMAGE = 1 << 20
SNIPPET = 400
_WIDTH, _HEIGHT, _FOOT = 920, 200, 26

_SIGNATURES = ((b"\xff\xd8\xff", "image/jpeg"), (b"\x89PNG\r\n\x1a\n", "image/png"))


def page(files: Sequence[str], shown: int = SHOWN) -> str:
    """Returns the page of `files`, with `shown` evenly spread samples; columns may differ.

    Raises the errors of `FileReader`; no damaged sample is shown.
    """
    names = file_names(files)
    listed = [describe_file(name) for name in names]
    ends = np.cumsum([0, *(each.samples for each in listed)])
    total = int(ends[-1])
    picked = np.array(sorted({i * total // shown for i in range(shown)}) if total else [], np.int64)
    sizes, samples = [], []
    for number, name in enumerate(names):
        first = int(ends[number])
        here = (picked[(picked >= first) & (picked < ends[number + 1])] - first).tolist()
        source = RecordSource(name)
        with source.reader as reader:
            sizes.append(some_lengths(reader))
            shown_rows = zip(here, source.rows_at(here), lengths(reader, here), strict=True)
            samples += [_sample(first + index, row, int(size)) for index, row, size in shown_rows]
    sizes_of_all = np.concatenate(sizes)
    kinds = {each.holds for each in listed}
    stats = of_lengths(sizes_of_all)
    cards = [
        (f"{total:,}", "samples", f"in {len(listed)} file{'s' if len(listed) != 1 else ''}"),
        (size_text(sum(each.bytes for each in listed)), "on disk", "index included"),
    ]
    if stats is not None:
        cards.append((size_text(stats.median), "median sample", f"mean {size_text(stats.mean)}"))
        cards.append(
            (size_text(stats.max), "largest sample", f"95 % are under {size_text(stats.p95)}")
        )
    rows = [
        f'<tr><th scope="row">{escape(each.file)}</th><td class="value">{each.samples:,}</td>'
        f'<td class="value">{size_text(each.bytes)}</td><td>{escape(columns_text(each))}</td></tr>'
        for each in listed
    ]
    return _PAGE.format(
        style=_STYLE,
        title=escape(names[0] if len(names) == 1 else f"{len(names)} record files"),
        kind=escape(_KINDS[kinds.pop()] if len(kinds) == 1 else "Files of several kinds"),
        cards="\n".join(_card(*card) for card in cards),
        chart=_chart(sizes_of_all),
        rows="\n".join(rows),
        shown=f"{len(samples)} of {total:,}, spread evenly",
        samples="\n".join(samples),
    )


_KINDS = {
    "bytes": "Samples of bytes",
    "packed folder": "A packed folder",
    "rows": "Rows with typed columns",
}


def _card(value: str, name: str, note: str) -> str:
    return (
        f'<li><strong>{escape(value)}</strong><span class="name">{escape(name)}</span>'
        f'<span class="note">{escape(note)}</span></li>'
    )


def _sample(index: int, row: Row, size: int) -> str:
    parts = "".join(_field(name, value, alone=len(row) == 1) for name, value in row.items())
    return (
        f'<li><p class="head"><span>#{index:,}</span><span>{size_text(size)}</span></p>{parts}</li>'
    )


def _field(name: str, value: Any, *, alone: bool) -> str:
    label = "" if alone else f'<span class="name">{escape(name)}</span> '
    if isinstance(value, list | dict | float | int) or value is None:
        value = repr(value)
    if isinstance(value, str):
        return f"<p>{label}{_snippet(value)}</p>"
    array = as_array(value) if not isinstance(value, bytes | bytearray | memoryview) else None
    if array is not None:
        if array.shape:
            kind = f"{array.dtype.name}{list(array.shape)}"
            head = np.array2string(array.ravel()[:8], threshold=8, precision=4, separator=", ")
            return f"<p>{label}<code>{escape(kind)} {escape(head)}</code></p>"
        return f"<p>{label}<code>{escape(str(array[()]))}</code></p>"
    data = bytes(value)
    for signature, kind in _SIGNATURES:
        if data.startswith(signature):
            return label + _image(data, kind)
    text = as_text(data[: 4 * SNIPPET], cut=len(data) > 4 * SNIPPET)
    if text is not None:
        return f"<p>{label}{_snippet(text)}</p>"
    return f"<p>{label}<code>{data[:48].hex(' ', 4)}{' ...' if len(data) > 48 else ''}</code></p>"


def _image(data: bytes, kind: str) -> str:
    if len(data) > LONGEST_IMAGE:
        return f"<p>{escape(kind)}, too large to show here</p>"
    coded = base64.b64encode(data).decode()
    return f'<img loading="lazy" alt="{escape(kind)}" src="data:{kind};base64,{coded}">'


def as_text(data: bytes, *, cut: bool = False) -> str | None:
    """Returns `data` as text if it is printable UTF-8; `cut` allows a truncated character."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=not cut)
    except UnicodeDecodeError:
        return None
    return text if all(c.isprintable() or c in "\n\r\t" for c in text) else None


def _snippet(text: str) -> str:
    cut = text[:SNIPPET]
    return f'<span class="text">{escape(cut)}{"…" if len(text) > SNIPPET else ""}</span>'


def _chart(sizes: np.ndarray[Any, np.dtype[np.int64]]) -> str:
    """Returns a histogram of the samples' lengths."""
    if not len(sizes):
        return "<p>No samples.</p>"
    counts, edges = histogram(sizes)
    top = max(counts)
    step = _WIDTH / len(counts)
    out = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT + _FOOT}" role="img" '
        'aria-labelledby="chart-title">',
        f'<title id="chart-title">Lengths of {len(sizes):,} samples from '
        f"{size_text(float(sizes.min()))} to {size_text(float(sizes.max()))}</title>",
    ]
    for number, count in enumerate(counts):
        height = count / top * (_HEIGHT - 4)
        tip = f"{size_text(edges[number])} to {size_text(edges[number + 1])}: {count:,}"
        out.append(
            f'<rect class="bar" x="{number * step + 1:.1f}" y="{_HEIGHT - height:.1f}" '
            f'width="{step - 2:.1f}" height="{height:.1f}"><title>{tip}</title></rect>'
        )
    out.append(f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{_HEIGHT}" y2="{_HEIGHT}"/>')
    for part, anchor in (
        (0.0, "start"),
        (0.25, "middle"),
        (0.5, "middle"),
        (0.75, "middle"),
        (1.0, "end"),
    ):
        size = edges[0] + part * (edges[-1] - edges[0])
        out.append(
            f'<text x="{part * _WIDTH:.0f}" y="{_HEIGHT + 20}" text-anchor="{anchor}">'
            f"{size_text(max(size, 0))}</text>"
        )
    return "\n".join([*out, "</svg>"])


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header>
<p class="brand"><span class="spark"></span>Fireflyer <span class="when">FFRecord</span></p>
<h1>{title}</h1>
<p class="lead">{kind}.</p>
</header>
<ul class="cards">
{cards}
</ul>
<section>
<h2>Lengths of the samples</h2>
<figure><div class="scroll">{chart}</div></figure>
</section>
<section>
<h2>Samples <span class="when">{shown}</span></h2>
<ul class="samples">
{samples}
</ul>
</section>
<section>
<h2>Files</h2>
<div class="scroll"><table>
<thead><tr><th scope="col">file</th><th scope="col">samples</th><th scope="col">size</th>
<th scope="col">columns</th></tr></thead>
<tbody>
{rows}
</tbody>
</table></div>
</section>
</main>
</body>
</html>
"""

_STYLE = """
:root { --paper: #fcfbf8; --card: #ffffff; --ink: #1d1b18; --soft: #66615a; --line: #e4dfd6;
  --glow: #c26a00; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --card: #1c1f25; --ink: #ece9e2;
  --soft: #a19c92; --line: #30343c; --glow: #ffb648; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 40px 24px 72px; }
.brand { margin: 0; font-weight: 650; letter-spacing: .01em; }
.spark { display: inline-block; width: 10px; height: 10px; margin-right: 10px; border-radius: 50%;
  background: var(--glow); box-shadow: 0 0 12px 3px color-mix(in srgb, var(--glow) 55%, transparent); }
.when { margin-left: 6px; font-size: 15px; font-weight: 400; color: var(--soft); }
h1 { margin: 14px 0 10px; font-size: clamp(24px, 4vw, 36px); line-height: 1.15; letter-spacing: -.02em;
  overflow-wrap: anywhere; }
h2 { margin: 48px 0 12px; font-size: 20px; letter-spacing: -.01em; }
.lead { margin: 0; font-size: 17px; color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 200px), 1fr)); gap: 12px;
  margin: 32px 0 0; padding: 0; list-style: none; }
.cards li, .samples li { padding: 16px 18px; border: 1px solid var(--line); border-radius: 12px;
  background: var(--card); }
.cards li { display: flex; flex-direction: column; }
.cards strong { font-size: 28px; line-height: 1.2; letter-spacing: -.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.cards .name { margin-top: 6px; font-weight: 600; }
.cards .note { font-size: 13px; color: var(--soft); }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 220px), 1fr)); gap: 12px;
  margin: 0; padding: 0; list-style: none; align-items: start; }
.samples .head { display: flex; justify-content: space-between; margin: 0 0 8px; font-size: 13px;
  color: var(--soft); font-variant-numeric: tabular-nums; }
.samples p { margin: 6px 0 0; font-size: 14px; overflow-wrap: anywhere; }
.samples .name { color: var(--soft); }
.samples .text { white-space: pre-wrap; }
.samples img { display: block; width: 100%; max-height: 260px; object-fit: contain; border-radius: 6px; }
code { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
figure { margin: 0; padding: 20px 12px 14px; border: 1px solid var(--line); border-radius: 12px;
  background: var(--card); }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 15px; }
th, td { padding: 9px 12px 9px 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
thead th { font-size: 13px; font-weight: 500; color: var(--soft); }
tbody th { font-weight: 500; overflow-wrap: anywhere; }
td { color: var(--soft); }
td.value { color: var(--ink); font-weight: 600; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg.chart { display: block; width: 100%; min-width: 480px; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); } svg .bar { fill: var(--glow); }
@media print { body { background: none; } figure, .cards li, .samples li { break-inside: avoid; } }
"""
