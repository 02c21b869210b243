"""The cluster as a drawing: zones, their leaves, and a cell per node. Pure.

Every leaf (the nodes of one switch) is a drawing of its own, COLUMNS cells wide, so that a narrow
page stacks the leaves. A cell shows the node's state by shape as well as colour: the part in use is
filled, and the cell of a node that is not ready has a letter.
"""

import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from fireflyer.hai.model import NodeView

COLUMNS = 10
CELL = 30
"""Size of a cell with its gap, in units of the drawing."""

MOST_CELLS = 4000
"""Maximum cells of a page. With more nodes, the page shows leaves as sums until a leaf is
selected."""

State = Literal["free", "partly", "full", "suspect", "drained", "down"]

LETTERS: dict[str, str] = {"suspect": "?", "drained": "D", "down": "×"}


class Cell(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Cell of one node. A page has thousands of cells; gc=False is safe because a cell holds only
    text and numbers."""

    name: str
    x: int
    y: int
    fill: int
    """Height of the part in use, at most CELL - 4."""
    state: State
    letter: str
    own: bool
    """True if one of the reader's own tasks holds the node."""
    title: str


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of one switch."""

    name: str
    counts: dict[State, int]
    cells: tuple[Cell, ...]
    """Cells of the nodes; empty: only the sums are shown."""
    height: int


class Zone(msgspec.Struct, frozen=True, kw_only=True):
    """Leaves of one network."""

    name: str
    leaves: tuple[Leaf, ...]


def state_of(node: NodeView) -> State:
    """Returns a node's state in the map, which distinguishes free, partly used and full nodes."""
    if node.state != "ready":
        return node.state
    if not node.tasks:
        return "free"
    return "partly" if node.free and node.gpus else "full"


def share_of(node: NodeView) -> float:
    """Returns the share of a node that is in use."""
    if node.gpus:
        return (node.gpus - node.free) / node.gpus
    return 1.0 if node.tasks else 0.0


def zones(nodes: Iterable[NodeView], own: set[str], wanted: str | None = None) -> list[Zone]:
    """Computes the drawing.

    Args:
        nodes: the nodes to draw, in any order.
        own: tasks of the reader.
        wanted: draw only this leaf; None: all.
    """
    found: dict[str, dict[str, list[NodeView]]] = {}
    count = 0
    for node in nodes:
        if wanted is None or node.leaf == wanted:
            found.setdefault(node.zone, {}).setdefault(node.leaf, []).append(node)
            count += 1
    drawn = count <= MOST_CELLS or wanted is not None
    return [
        Zone(
            name=zone,
            leaves=tuple(
                _leaf(leaf, found[zone][leaf], own, drawn) for leaf in in_order(found[zone])
            ),
        )
        for zone in in_order(found)
    ]


def _leaf(name: str, nodes: list[NodeView], own: set[str], drawn: bool) -> Leaf:
    by_name = {node.name: node for node in nodes}
    counts: dict[State, int] = {}
    cells = []
    for number, node in enumerate(by_name[each] for each in in_order(by_name)):
        state = state_of(node)
        counts[state] = counts.get(state, 0) + 1
        if drawn and number < MOST_CELLS:
            cells.append(_cell(node, state, number, own))
    rows = -(-len(cells) // COLUMNS)
    return Leaf(name=name, counts=counts, cells=tuple(cells), height=rows * CELL)


def _cell(node: NodeView, state: State, number: int, own: set[str]) -> Cell:
    row, column = divmod(number, COLUMNS)
    holds = ", ".join(node.tasks[:5]) or "nothing"
    gpus = f", {node.free} of {node.gpus} GPUs free" if node.gpus else ""
    return Cell(
        name=node.name, x=column * CELL + 2, y=row * CELL + 2,
        fill=round((CELL - 4) * share_of(node)), state=state, letter=LETTERS.get(state, ""),
        own=any(task in own for task in node.tasks), title=f"{node.name}: {state}, holds {holds}{gpus}",
    )  # fmt: skip


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts names with numbers by value: n2 before n10."""
    return sorted(names, key=lambda name: [(len(p), p) for p in re.findall(r"\d+|\D+", name)])
