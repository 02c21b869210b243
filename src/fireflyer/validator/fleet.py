"""Reader of a fleet's measurements, and the judgement of all its checks."""

import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from fireflyer.errors import ValidatorError
from fireflyer.validator.judgement import CheckJudgement, judge
from fireflyer.validator.model import Better

COLUMNS = ("node", "check", "value", "better")

ROUND = "round"
"""Optional column: name of the measurement round to which a row belongs."""

MOST = 1e100
"""Largest allowed value; the limit keeps sums and ratios of values finite."""

CONFIRMED = 2
"""Number of rounds that must name a node if a check has several rounds."""


class Measurements(msgspec.Struct, frozen=True):
    """Measurements of one check."""

    better: Better
    rounds: dict[str, dict[str, list[float]]]
    """Measurements of each node by round; files without the column `round` have one round, ""."""

    def add(self, node: str, values: Iterable[float], of_round: str = "") -> None:
        """Adds measurements of a node."""
        self.rounds.setdefault(of_round, {}).setdefault(node, []).extend(values)

    @property
    def values(self) -> dict[str, list[float]]:
        """Measurements of each node in all rounds."""
        found: dict[str, list[float]] = {}
        for nodes in self.rounds.values():
            for node, values in nodes.items():
                found.setdefault(node, []).extend(values)
        return found


def read(path: Path) -> dict[str, Measurements]:
    """Reads the measurements of a file, by check.

    Args:
        path: CSV with a header and the columns node, check, value and better (more or less), in any
            order; with several rounds also the column round. Other columns are ignored.

    Raises:
        ValidatorError: the file cannot be read, or a row has an error; the error names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return parse(file, str(path))
    except OSError as error:
        raise ValidatorError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValidatorError(f"cannot read {path}: expected a CSV file in UTF-8") from None


def parse(lines: Iterable[str], name: str) -> dict[str, Measurements]:
    """Parses the lines of a file of measurements.

    Args:
        name: name of the file in errors.

    Raises:
        ValidatorError: a row has an error; the error names the line.
    """
    rows = csv.DictReader(lines)
    try:
        head = list(rows.fieldnames or ())
        for column in COLUMNS:
            if column not in head:
                expected = ", ".join(COLUMNS)
                raise ValidatorError(
                    f"{name} has no column {column!r}: expected a header with {expected}"
                )
        for column in (*COLUMNS, ROUND):
            if head.count(column) > 1:
                raise ValidatorError(f"{name} has two columns {column!r}: rename one of them")
        found: dict[str, Measurements] = {}
        for row in rows:
            _add(found, row, f"{name}, line {rows.line_num}")
    except csv.Error as error:
        raise ValidatorError(f"{name}, line {rows.line_num}: {error}") from None
    if not found:
        raise ValidatorError(f"{name} has no measurement: expected a row for each of them")
    return found


def _add(found: dict[str, Measurements], row: Mapping[str, Any], where: str) -> None:
    if None in row:
        raise ValidatorError(f"{where}: the row has more fields than the header has columns")
    node, check, text, better = ((row[column] or "").strip() for column in COLUMNS)
    if not node or not check:
        raise ValidatorError(f"{where}: the row has no {'check' if node else 'node'}")
    if better != "more" and better != "less":
        raise ValidatorError(f"{where}: invalid better {better!r}: expected more or less")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= MOST:
        raise ValidatorError(
            f"{where}: invalid value {text!r}: expected a finite number, at most {MOST:g} in size"
        )
    of_check = found.setdefault(check, Measurements(cast(Better, better), {}))
    if better != of_check.better:
        raise ValidatorError(
            f"{where}: check {check!r} is better with {better} here and with {of_check.better} in "
            "earlier rows; use one of them for each check"
        )
    of_check.add(node, (value,), (row.get(ROUND) or "").strip())


def judge_fleet(found: Mapping[str, Measurements]) -> list[CheckJudgement]:
    """Judges each check over all nodes.

    If a check has several rounds, a node is defective only if the rounds confirm it: all
    measurements together name it, and so do at least CONFIRMED rounds, each judged alone. A stall
    of the machine affects a node in one round only.
    """
    return [_judged(check, of_check) for check, of_check in found.items()]


def _judged(check: str, measured: Measurements) -> CheckJudgement:
    whole = judge(check, measured.values, measured.better)
    if len(measured.rounds) < CONFIRMED or not any(node.defective for node in whole.nodes):
        return whole
    named = Counter(
        node.node
        for values in measured.rounds.values()
        for node in judge(check, values, measured.better).nodes
        if node.defective
    )
    nodes = tuple(
        msgspec.structs.replace(node, defective=node.defective and named[node.node] >= CONFIRMED)
        for node in whole.nodes
    )
    return msgspec.structs.replace(whole, nodes=nodes)


def report(judged: Iterable[CheckJudgement]) -> dict[str, Any]:
    """Returns the judgement as plain data.

    Returns:
        `defective`: node, check and similarity, worst first; `fixed` and `zscore`: nodes and checks
            that the fixed rule and the z-score rule name; `checks`: a summary of each check.
    """
    judged = list(judged)
    every = [(of_check, node) for of_check in judged for node in of_check.nodes]
    worst = sorted(every, key=lambda pair: pair[1].similarity)
    return {
        "defective": [
            {"node": node.node, "check": of.check, "similarity": round(node.similarity, 6)}
            for of, node in worst
            if node.defective
        ],
        "fixed": [{"node": n.node, "check": of.check} for of, n in every if n.fixed],
        "zscore": [{"node": n.node, "check": of.check} for of, n in every if n.zscore],
        "checks": [_summary(of_check) for of_check in judged],
    }


def _summary(of_check: CheckJudgement) -> dict[str, Any]:
    return {
        "check": of_check.check,
        "better": of_check.better,
        "nodes": len(of_check.nodes),
        "samples": sum(node.samples for node in of_check.nodes),
        "defective": sum(node.defective for node in of_check.nodes),
        "criterion": of_check.criterion,
        "threshold": of_check.threshold,
        "scatter": of_check.scatter,
        "reason": of_check.reason,
    }
