"""Implementation of `fireflyer validate`."""

import sys
from pathlib import Path

from fireflyer.cli.printing import as_json, table
from fireflyer.program import plain
from fireflyer.validator import fleet as fleets
from fireflyer.validator.judgement import CheckJudgement


def fleet(file: Path, *, json: bool) -> None:
    """Prints the judgement of a file of measurements."""
    judged = fleets.judge_fleet(fleets.read(file))
    if json:
        as_json(fleets.report(judged))
        return
    table(
        ("CHECK", "NODES", "SAMPLES", "CRITERION", "SCATTER", "THRESHOLD", "DEFECTIVE", "NOTE"),
        [_check_row(of_check) for of_check in judged],
    )
    rows = [
        (
            node.node, of_check.check, f"{node.similarity:.4f}", f"{node.deviation:.1f}", node.part,
            f"{node.median:.6g}", "yes" if node.fixed else "no", "yes" if node.zscore else "no",
        )
        for of_check in judged
        for node in sorted(of_check.nodes, key=lambda node: node.similarity)
        if node.defective
    ]  # fmt: skip
    if rows:
        sys.stdout.write("\n")
        heads = ("NODE", "CHECK", "SIMILARITY", "SIGMAS", "PART", "MEDIAN", "5 % RULE", "Z RULE")
        table(heads, rows)
    else:
        sys.stdout.write("\nno node is defective\n")


def _check_row(of_check: CheckJudgement) -> tuple[str, ...]:
    samples = sum(node.samples for node in of_check.nodes)
    defective = sum(node.defective for node in of_check.nodes)
    found = [plain(of_check.check), f"{len(of_check.nodes)}", f"{samples}"]
    if of_check.criterion is None or of_check.threshold is None or of_check.scatter is None:
        return (*found, "-", "-", "-", "-", of_check.reason)
    return (
        *found, f"{of_check.criterion:.6g}", f"{of_check.scatter:.2%}",
        f"{of_check.threshold:.4f}", f"{defective}", "",
    )  # fmt: skip
