"""Newest validation results of all nodes, compared with each other. A figure is one value that a
check measures. Pure."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from fireflyer.hai.model.validations import Ended, Finding
from fireflyer.validator.judgement import judge

Standing = Literal["passed", "not run", "worse", "failed"]
"""Status of a figure; worse: the figure passed its limits, but is an outlier in the fleet."""

SEVERITY: tuple[Standing, ...] = ("passed", "not run", "worse", "failed")


class Cell(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Newest result of one figure on one node. A fleet has thousands of cells; gc=False is safe
    because a cell holds only text and numbers."""

    node: str
    figure: str
    standing: Standing
    value: float | None
    unit: str
    loss: float | None
    """Loss against the fleet's median, as a share of the median; below 0: better. None: unknown."""
    reason: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Newest results of a fleet."""

    nodes: tuple[str, ...]
    """Validated nodes, in the order of the input."""
    figures: tuple[str, ...]
    """Figures that at least one node measured or failed, then figures that no node could
    measure."""
    medians: dict[str, float]
    """Median of each figure over the nodes that measured the figure."""
    cells: dict[str, dict[str, Cell]]
    """Cells by figure, then node."""


def health(latest: Mapping[str, Ended]) -> Health:
    """Compares the newest results of all nodes.

    Args:
        latest: newest validation with results of each node; the result keeps the order of nodes.
    """
    findings: dict[str, dict[str, Finding]] = {}
    for node, ended in latest.items():
        for found in ended.findings:
            findings.setdefault(found.name, {})[node] = found
    medians: dict[str, float] = {}
    cells: dict[str, dict[str, Cell]] = {}
    for figure, by_node in findings.items():
        values = {node: [f.value] for node, f in by_node.items() if f.value is not None}
        worse: set[str] = set()
        if values:
            medians[figure] = _median([value for (value,) in values.values()])
            judged = judge(figure, values, next(iter(by_node.values())).better)
            worse = {each.node for each in judged.nodes if each.defective}
        cells[figure] = {
            node: _cell(node, found, medians.get(figure), node in worse)
            for node, found in by_node.items()
        }
    known = [name for name in findings if _measured(cells[name])]
    unknown = [name for name in findings if name not in known]
    return Health(nodes=tuple(latest), figures=(*known, *unknown), medians=medians, cells=cells)


def _measured(cells: Mapping[str, Cell]) -> bool:
    return any(cell.standing != "not run" for cell in cells.values())


def _median(values: list[float]) -> float:
    """Returns the middle value; with an even number of values the lower of the two middle values,
    so that the result is a measured value."""
    return sorted(values)[(len(values) - 1) // 2]


def _cell(node: str, found: Finding, median: float | None, worse: bool) -> Cell:
    standing: Standing = found.status
    if standing == "passed" and worse:
        standing = "worse"
    return Cell(
        node=node, figure=found.name, standing=standing, value=found.value, unit=found.unit,
        loss=loss(found, median), reason=found.reason,
    )  # fmt: skip


def loss(found: Finding, median: float | None) -> float | None:
    """Returns the loss of a result against a median, as a share of the median; None: no value, or
    no median."""
    if found.value is None or not median:
        return None
    share = (found.value - median) / abs(median)
    return -share if found.better == "more" else share


def noteworthy(found: Health, most: int) -> list[Cell]:
    """Returns at most `most` cells that failed or are worse than the fleet, worst first."""
    cells = [
        cell
        for of_figure in found.cells.values()
        for cell in of_figure.values()
        if cell.standing in ("failed", "worse")
    ]
    cells.sort(key=lambda cell: (-SEVERITY.index(cell.standing), -(cell.loss or 0.0), cell.node))
    return cells[:most]
