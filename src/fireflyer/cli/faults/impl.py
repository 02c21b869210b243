"""Implementation of `fireflyer faults`."""

import sys
from pathlib import Path

from fireflyer.cli import printing
from fireflyer.hai.client import Client
from fireflyer.hai.faults.rules import Faults, Rule


def show(home: Path | None, limit: int, *, full: bool, json: bool) -> None:
    """Prints the rules in force, then the latest observations and actions."""
    found = Client(home).faults(limit)
    printing.show_result(found, lambda: _show_text(found, full=full), json=json)


def _show_text(found: Faults, *, full: bool) -> None:
    heads = ["RULE", "ON", "ACTION", "CAUSE"] + (["WHY", "SOURCE"] if full else [])
    rows = [_row(rule, full=full) for rule in found.rules]
    printing.table(heads, rows)
    if found.events:
        sys.stdout.write("\n")
        printing.events(list(found.events), json=False)


def _row(rule: Rule, *, full: bool) -> list[str]:
    on = rule.on
    for values in (rule.codes, rule.signals, rule.states):
        if values:
            on += " " + ",".join(map(str, values))
    if rule.at_least > 1:
        within = f" in {printing.age(rule.within_s)}" if rule.within_s else ""
        on += f", {rule.at_least} times{within}"
    action = rule.action + (", ends the attempt" if rule.end else "")
    return [rule.name, on, action, rule.cause] + ([rule.why, rule.source] if full else [])
