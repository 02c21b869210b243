"""`fireflyer ledger`: the goodput ledger as a table with a bar, or JSON."""

import sys
import time
from pathlib import Path
from typing import Any

from fireflyer.cli import printing
from fireflyer.cli.durations import seconds
from fireflyer.errors import TaskError
from fireflyer.hai.client import Client
from fireflyer.hai.ledger import CAUSES, IDLE, Account, Books, Shape, account
from fireflyer.hai.model import Event

BAR = 50
"""Characters of a bar."""

MARKS = {
    "useful": "█", "lost work": "x", "fault": "!", "restart": "r", "starting": "s", "suspended": "-",
    "fragmentation": "f", "queue": ".", IDLE: " ",
}  # fmt: skip


def show(home: Path | None, task: str | None, *, cluster: bool, since: str, json: bool) -> None:
    """Reads the history and prints what became of the time."""
    client = Client(home)
    now = time.time()
    begin = now - seconds(since, "--since") if since else 0.0
    nodes = client.nodes()
    views = client.tasks()
    if task is not None and task not in {view.id for view in views}:
        raise TaskError(f"no task {task!r} here; `fireflyer ps --all` lists them")
    shapes = [Shape(task=view.id, nodes=view.spec.nodes) for view in views]
    gpus = {node.name: node.gpus for node in nodes}
    books = account(shapes, _history(client), gpus=gpus, until=now, since=begin)
    wanted = {task: books.tasks[task]} if task else books.tasks
    if json:
        _as_json(books, wanted, cluster=cluster)
        return
    hours = books.unit + "-hours"
    if cluster:
        _one("cluster", books.cluster, hours)
    elif task:
        _one(task, books.tasks[task], hours)
    else:
        _all(books, hours)


def _history(client: Client) -> list[Event]:
    found: list[Event] = []
    while more := client.events(after=found[-1].seq if found else 0):
        found += more
    return found


def _as_json(books: Books, wanted: dict[str, Account], *, cluster: bool) -> None:
    printing.as_json(
        {
            "unit": books.unit,
            "since": books.since / 1e6,
            "until": books.until / 1e6,
            "tasks": {name: _plain(one) for name, one in wanted.items()},
            "total": _plain(books.total),
            **({"cluster": _plain(books.cluster)} if cluster else {}),
        }
    )


def _plain(one: Account) -> dict[str, Any]:
    """Seconds times nodes or GPUs."""
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
    sys.stdout.write(f"\n[{bar(one)}]\n{_legend(one)}\n{ratio}\n")


def _all(books: Books, hours: str) -> None:
    rows = [
        (name, _hours(one.whole), f"{100 * one.ettr:.1f} %", f"{100 * one.goodput:.1f} %", bar(one))
        for name, one in [*books.tasks.items(), ("all", books.total)]
    ]
    printing.table(("TASK", hours.upper(), "ETTR", "GOODPUT", "WHERE IT WENT"), rows)
    sys.stdout.write(f"\n{_legend(books.total)}\n")


def _hours(amount: int) -> str:
    return f"{amount / 3.6e9:.3f}"


def _legend(one: Account) -> str:
    found = [cause for cause, amount in one.parts.items() if amount]
    return "  ".join(f"{MARKS[cause]} {cause}" for cause in found if cause != IDLE)


def bar(one: Account, width: int = BAR) -> str:
    """`width` characters, shared out by largest remainder in the order of the causes."""
    if not one.whole:
        return " " * width
    order = [*CAUSES, IDLE]
    exact = {cause: one.parts.get(cause, 0) * width for cause in order}
    cells = {cause: amount // one.whole for cause, amount in exact.items()}
    left = width - sum(cells.values())
    for cause in sorted(order, key=lambda cause: -(exact[cause] % one.whole))[:left]:
        cells[cause] += 1
    return "".join(MARKS[cause] * cells[cause] for cause in order)
