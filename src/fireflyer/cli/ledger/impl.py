"""Implementation of `fireflyer ledger`: the goodput ledger as a table with a bar, or as JSON."""

import sys
import time
from pathlib import Path
from typing import Any

from fireflyer.cli import printing
from fireflyer.hai.client import Client
from fireflyer.hai.ledger import CAUSES, IDLE, Account, LedgerView
from fireflyer.program import encodable
from fireflyer.units import parse_seconds

BAR = 50
"""Maximum width of a bar in characters."""
LEAST_BAR = 10
"""Minimum width of a bar."""

MARKS = {
    "useful": "█", "lost work": "x", "fault": "!", "restart": "r", "starting": "s", "suspended": "-",
    "fragmentation": "f", "queue": ".", "validation": "v", IDLE: " ",
}  # fmt: skip


def show(
    home: Path | None, task: str | None, *, user: str | None, group: str | None, cluster: bool,
    since: str, until: str, json: bool,
) -> None:  # fmt: skip
    """Fetches the ledger from the server and prints it."""
    now = time.time()
    view = Client(home).ledger(
        task,
        user=user,
        group=group,
        since=now - parse_seconds(since, "--since") if since else 0.0,
        until=now - parse_seconds(until, "--until") if until else None,
        cluster=cluster,
    )
    printing.show_result(_document(view), lambda: _show_text(view, task, user, group), json=json)


def _show_text(view: LedgerView, task: str | None, user: str | None, group: str | None) -> None:
    hours = view.unit + "-hours"
    if view.cluster is not None:
        _one("cluster", view.cluster, hours)
        if task or user or group:
            sys.stdout.write("\n")
    if task:
        _one(task, view.tasks[task], hours)
    elif user or group:
        _one(" ".join(filter(None, (user, group))), view.total, hours)
        sys.stdout.write("\n")
        _all(view, hours)
    elif view.cluster is None:
        _all(view, hours)


def _document(view: LedgerView) -> dict[str, Any]:
    cluster = {} if view.cluster is None else {"cluster": _plain(view.cluster)}
    return {
        "unit": view.unit,
        "since": view.since,
        "until": view.until,
        "tasks": {name: _plain(one) for name, one in view.tasks.items()},
        "total": _plain(view.total),
        **cluster,
    }


def _plain(one: Account) -> dict[str, Any]:
    """Returns an account with amounts in node-seconds or GPU-seconds."""
    parts = {cause: amount / 1e6 for cause, amount in one.parts.items()}
    ratios = {"ettr": round(one.ettr, 6), "goodput": round(one.goodput, 6)}
    return {"whole_s": one.whole / 1e6, "held_s": one.held / 1e6, "parts_s": parts, **ratios}


def _one(name: str, one: Account, hours: str) -> None:
    rows = [
        (cause, _hours(amount), f"{100 * amount / one.whole:.1f} %")
        for cause, amount in one.parts.items()
        if amount
    ]
    rows.append(("whole", _hours(one.whole), ""))
    printing.table((name.upper(), hours.upper(), "SHARE"), rows)
    ratio = f"goodput {100 * one.goodput:.1f} %"
    if IDLE not in one.parts:
        ratio = f"effective training time ratio {100 * one.ettr:.1f} %, " + ratio
    sys.stdout.write(f"\n[{bar(one, min(BAR, printing.width() - 2))}]\n{_legend(one)}\n{ratio}\n")


def _all(view: LedgerView, hours: str) -> None:
    heads = ("TASK", hours.upper(), "ETTR", "GOODPUT")
    found = [*view.tasks.items(), ("all", view.total)]
    rows = [
        (name, _hours(one.whole), f"{100 * one.ettr:.1f} %", f"{100 * one.goodput:.1f} %")
        for name, one in found
    ]
    from fireflyer.cli.tables import GAP

    left = printing.width() - sum(
        max(map(len, cells)) + GAP for cells in zip(heads, *rows, strict=True)
    )
    wide = max(min(BAR, left), LEAST_BAR)
    bars = [(*row, bar(one, wide)) for row, (_, one) in zip(rows, found, strict=True)]
    printing.table((*heads, "WHERE IT WENT"), bars)
    sys.stdout.write(f"\n{_legend(view.total)}\n")


def _hours(amount: int) -> str:
    return f"{amount / 3.6e9:.3f}"


def _legend(one: Account) -> str:
    found = [cause for cause, amount in one.parts.items() if amount]
    return "  ".join(f"{_mark(cause)} {cause}" for cause in found if cause != IDLE)


def bar(one: Account, width: int = BAR) -> str:
    """Returns a bar of `width` characters, which the causes share in the order of `CAUSES`.

    The shares are rounded by the largest-remainder method.
    """
    if not one.whole:
        return " " * width
    order = [*CAUSES, IDLE]
    exact = {cause: one.parts.get(cause, 0) * width for cause in order}
    cells = {cause: amount // one.whole for cause, amount in exact.items()}
    left = width - sum(cells.values())
    for cause in sorted(order, key=lambda cause: -(exact[cause] % one.whole))[:left]:
        cells[cause] += 1
    return "".join(_mark(cause) * cells[cause] for cause in order)


def _mark(cause: str) -> str:
    """Returns the mark of a cause; "#" if stdout cannot encode the mark."""
    return MARKS[cause] if encodable(MARKS[cause]) else "#"
