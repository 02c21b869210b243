"""Layout of tables: which cells share a line, which wrap, and which move below their row.

The layout is a pure function of texts and a width. Identifiers, names, states and numbers are never
divided. Long texts wrap in the space that is left. A column that would get less than `LEAST`
characters moves below its row, where each text follows the head of its column. If the rest of a row
still exceeds the width, further columns move: the last columns first, then the widest, and never the
first column. Below the row, a text that does not fit beside its head stands under the head. Nothing
is cut: a line exceeds the terminal only if one identifier, name, state, number or head does.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells

WRAPPING = frozenset(
    {
        *("ACTION", "ADDRESS", "CAUSE", "DETAIL", "FOR", "GROUPS", "LOG", "MEMBERS", "METRICS"),
        *("NODES", "NOTE", "ON", "OUTCOME", "REASON", "SOURCE", "TARGETS", "TASKS", "WHY"),
    }
)
"""Heads of columns whose cells may be long; every other column keeps its width."""

LEAST = 24
"""Minimum width of a wrapped column."""

KEPT = 3
"""Number of leading columns that move below their row only after all others, because they name the
row."""

GAP = 2
"""Blanks between columns."""

INDENT = "    "


class Cell(NamedTuple):
    """Piece of a line, and the column it belongs to."""

    text: str
    column: int


Line = list[Cell]


def lay_out(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> tuple[Line, list[Line]]:
    """Returns the line of the heads, and the lines of all rows.

    Args:
        heads: a text per column.
        rows: cells per row; each is one line of printable characters.
        width: columns of the terminal.
    """
    natural = [max(map(cell_len, cells)) for cells in zip(heads, *rows, strict=True)]
    widths, below = _divide(heads, natural, width)
    inline = [column for column in range(len(heads)) if column not in below]
    lines: list[Line] = []
    for row in rows:
        lines += _beside(row, inline, widths)
        for column in below:
            if row[column]:
                lines += _beneath(heads[column], row[column], column, width)
    return _beside(heads, inline, widths)[0], lines


def align(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table of unlimited width, the heads first."""
    columns = [_padded(cells) for cells in zip(heads, *rows, strict=True)]
    gap = " " * GAP
    return [gap.join(cells).rstrip() for cells in zip(*columns, strict=True)]


def _padded(cells: Sequence[str]) -> list[str]:
    """Returns the cells with blanks up to the width of the widest cell."""
    if "".join(cells).isascii():  # each character fills one column of the terminal
        width = max(map(len, cells))
        return [cell.ljust(width) for cell in cells]
    widths = list(map(cell_len, cells))
    width = max(widths)
    return [cell + " " * (width - own) for cell, own in zip(cells, widths, strict=True)]


def wrap(text: str, width: int) -> list[str]:
    """Breaks a text at blanks into lines of at most `width` columns; longer words are divided.

    A blank at a break is left out; every other character is kept.
    """
    lines: list[str] = []
    line = ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if cell_len(longer) <= width:
            line = longer
            continue
        if line:
            lines.append(line)
        *full, line = chop_cells(word, width) or [""]
        lines += full
    return [*lines, line]


def _divide(heads: Sequence[str], natural: list[int], width: int) -> tuple[list[int], list[int]]:
    """Returns the width of each column, and the columns that move below their rows."""
    widths, below = list(natural), list[int]()
    if sum(natural) + GAP * (len(natural) - 1) <= width:
        return widths, below
    flexible = [
        column for column, head in enumerate(heads) if head in WRAPPING and natural[column] > LEAST
    ]
    flexible.sort(key=lambda column: natural[column])
    while flexible:
        inline = [column for column in range(len(heads)) if column not in below]
        fixed = sum(natural[column] for column in inline if column not in flexible)
        left = width - fixed - GAP * (len(inline) - 1)
        if left >= LEAST * len(flexible):
            for done, column in enumerate(flexible):
                widths[column] = min(natural[column], left // (len(flexible) - done))
                left -= widths[column]
            break
        below.append(flexible.pop())
    inline = [column for column in range(len(heads)) if column not in below]
    while len(inline) > 1 and sum(widths[c] + GAP for c in inline) - GAP > width:
        last = inline[-1] if len(inline) > KEPT else max(inline[1:], key=lambda c: widths[c])
        inline.remove(last)
        below.append(last)
    return widths, sorted(below)


def _beside(row: Sequence[str], inline: Sequence[int], widths: Sequence[int]) -> list[Line]:
    """Returns the lines of the cells that stand side by side."""
    pieces = [wrap(row[column], max(widths[column], 1)) for column in inline]
    lines: list[Line] = []
    for at in range(max(map(len, pieces), default=0)):
        line: Line = []
        for column, wrapped in zip(inline, pieces, strict=True):
            text = wrapped[at] if at < len(wrapped) else ""
            last = column == inline[-1]
            pad = 0 if last else widths[column] - cell_len(text) + GAP
            line.append(Cell(text + " " * pad, column))
        lines.append(line)
    return lines


def _beneath(head: str, text: str, column: int, width: int) -> list[Line]:
    """Returns the lines of a cell below its row: behind the head of its column, or under the
    head."""
    left = f"{INDENT}{head}  " if head else INDENT
    room = width - cell_len(left)
    if cell_len(text) <= room or (room >= LEAST and head in WRAPPING):
        pieces = wrap(text, room)
        starts = [left, *(" " * len(left),) * (len(pieces) - 1)]
        return [[Cell(start + piece, column)] for start, piece in zip(starts, pieces, strict=True)]
    pieces = wrap(text, max(width - len(INDENT), LEAST // 2)) if head in WRAPPING else [text]
    under = " " * min(len(INDENT), max(width - max(map(cell_len, pieces)), 0))
    top = [[Cell(left, column)]] if head else []
    return [*top, *([Cell(under + piece, column)] for piece in pieces)]
