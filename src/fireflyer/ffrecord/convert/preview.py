"""HTML preview of record files: self-contained, without scripts, for light and dark screens.

The stored bytes of JPEG and PNG images are embedded as data: URIs; nothing is decoded here. All
data from the files is escaped.
"""

import base64
import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fireflyer.charts import render, svg
from fireflyer.charts.svg import Markup
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
"""Maximum size in bytes of an image that the page shows."""
SNIPPET = 400
"""Maximum number of characters of a text that the page shows."""
_WIDTH, _HEIGHT, _FOOT = 920, 200, 26

_SIGNATURES = ((b"\xff\xd8\xff", "image/jpeg"), (b"\x89PNG\r\n\x1a\n", "image/png"))


def page(files: Sequence[str], shown: int = SHOWN) -> str:
    """Returns the page of `files`, with `shown` evenly spread samples. Files may have different
    columns.

    Raises the errors of `FileReader`, also for a damaged sample.
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
            samples += [
                Sample(first + index, size_text(int(size)), _fields(row))
                for index, row, size in shown_rows
            ]
    sizes_of_all = np.concatenate(sizes)
    kinds = {each.holds for each in listed}
    stats = of_lengths(sizes_of_all)
    tiles = [
        (f"{total:,}", "samples", f"in {len(listed)} file{'s' if len(listed) != 1 else ''}"),
        (size_text(sum(each.bytes for each in listed)), "on disk", "index included"),
    ]
    if stats is not None:
        tiles.append((size_text(stats.median), "median sample", f"mean {size_text(stats.mean)}"))
        tiles.append(
            (size_text(stats.max), "largest sample", f"95 % are under {size_text(stats.p95)}")
        )
    rows = [(each.file, each.samples, size_text(each.bytes), columns_text(each)) for each in listed]
    return render(
        "preview.html", "fireflyer.ffrecord.convert", tiles=tiles, rows=rows, samples=samples,
        title=names[0] if len(names) == 1 else f"{len(names)} record files",
        kind=_KINDS[kinds.pop()] if len(kinds) == 1 else "Files of several kinds",
        chart=_chart(sizes_of_all), shown=f"{len(samples)} of {total:,}, spread evenly",
    )  # fmt: skip


_KINDS = {
    "bytes": "Samples of bytes",
    "packed folder": "A packed folder",
    "rows": "Rows with typed columns",
}


class Field(NamedTuple):
    """Value of a column of a sample.

    Attributes:
        name: name of the column; "" if the sample has only this column.
        kind: "text", "code", "image" or "note": how to show the value.
        value: text, or the address of an image.
    """

    name: str
    kind: str
    value: str


class Sample(NamedTuple):
    """Sample of the page."""

    number: int
    size: str
    fields: list[Field]


def _fields(row: Row) -> list[Field]:
    alone = len(row) == 1
    return [Field("" if alone else name, *_shown(value)) for name, value in row.items()]


def _shown(value: Any) -> tuple[str, str]:
    """Returns how to show a value, and its text."""
    if isinstance(value, list | dict | float | int) or value is None:
        value = repr(value)
    if isinstance(value, str):
        return "text", _snippet(value)
    array = as_array(value) if not isinstance(value, bytes | bytearray | memoryview) else None
    if array is not None:
        if not array.shape:
            return "code", str(array[()])
        head = np.array2string(array.ravel()[:8], threshold=8, precision=4, separator=", ")
        return "code", f"{array.dtype.name}{list(array.shape)} {head}"
    data = bytes(value)
    for signature, kind in _SIGNATURES:
        if data.startswith(signature):
            if len(data) > LONGEST_IMAGE:
                return "note", f"{kind}, too large to show here"
            return "image", f"data:{kind};base64,{base64.b64encode(data).decode()}"
    text = as_text(data[: 4 * SNIPPET], cut=len(data) > 4 * SNIPPET)
    if text is not None:
        return "text", _snippet(text)
    return "code", data[:48].hex(" ", 4) + (" ..." if len(data) > 48 else "")


def as_text(data: bytes, *, cut: bool = False) -> str | None:
    """Returns `data` as text if it is printable UTF-8; `cut` allows a truncated character."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=not cut)
    except UnicodeDecodeError:
        return None
    return text if all(c.isprintable() or c in "\n\r\t" for c in text) else None


def _snippet(text: str) -> str:
    return text if len(text) <= SNIPPET else f"{text[:SNIPPET]}…"


def _chart(sizes: np.ndarray[Any, np.dtype[np.int64]]) -> Markup | None:
    """Returns a histogram of the samples' lengths; None without a sample."""
    if not len(sizes):
        return None
    counts, edges = histogram(sizes)
    step = _WIDTH / len(counts)
    parts = []
    for number, count in enumerate(counts):
        height = count / max(counts) * (_HEIGHT - 4)
        tip = f"{size_text(edges[number])} to {size_text(edges[number + 1])}: {count:,}"
        parts.append(
            svg.rect(number * step + 1, _HEIGHT - height, step - 2, height, tip, class_="m0")
        )
    parts.append(svg.line(0, _HEIGHT, _WIDTH, _HEIGHT))
    for place in range(5):
        anchor = "start" if place == 0 else "end" if place == 4 else "middle"
        size = edges[0] + place / 4 * (edges[-1] - edges[0])
        parts.append(svg.text(size_text(max(size, 0)), place / 4 * _WIDTH, _HEIGHT + 20, anchor))
    ends = f"{size_text(float(sizes.min()))} to {size_text(float(sizes.max()))}"
    title = f"Lengths of {len(sizes):,} samples from {ends}"
    return svg.drawing(title, _WIDTH, _HEIGHT + _FOOT, parts)
