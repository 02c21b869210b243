"""Implementation of `fireflyer validate node`."""

import sys
from pathlib import Path

from fireflyer.cli.printing import clock, show_list, show_result
from fireflyer.hai.client import Client
from fireflyer.hai.model.validations import Ended, Entry, Returned, Started, Suspected
from fireflyer.program import plain


def node(home: Path | None, name: str, *, history: bool, json: bool) -> None:
    """Asks for a validation of a node, or prints its history."""
    client = Client(home)
    if not history:
        client.validate(name)
        line = f"{plain(name)} is validated once it is idle\n"
        result = {"node": name, "requested": True}
        show_result(result, lambda: sys.stdout.write(line), json=json)
        return
    heads = ("TIME", "EVENT", "TASK", "REASON")
    show_list(client.validations(name), heads, _row, json=json)


def _row(entry: Entry) -> tuple[str, ...]:
    when = clock(entry.wall)
    match entry:
        case Suspected():
            what = f"{entry.kind} {entry.check}".strip()
            return (when, "drained" if entry.drained else "suspected", "", what)
        case Started():
            return (when, "started", entry.task, entry.trigger)
        case Returned():
            return (when, "returned", "", "")
        case Ended():
            return (when, "ended", entry.task, entry.error or _summary(entry))


def _summary(entry: Ended) -> str:
    if entry.failed:
        return "; ".join(f"{found.name} failed: {found.reason}" for found in entry.failed)
    passed = sum(found.status == "passed" for found in entry.findings)
    return f"{passed} passed, {len(entry.findings) - passed} not run"
