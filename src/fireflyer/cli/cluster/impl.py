"""Implementation of the verbs about nodes and the queue."""

import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import cast, get_args

from fireflyer.cli.printing import age, as_json, show_list, show_result, table, tasks
from fireflyer.errors import ConfigError
from fireflyer.hai.client import Client
from fireflyer.hai.model import NodeView, TaskLine, TaskState, WhyView, WindowView
from fireflyer.program import plain
from fireflyer.units import parse_seconds

REFRESH_S = 2.0
GIB = 1 << 30


def moment(text: str, option: str) -> float:
    """Returns the seconds since 1970 of a duration from now or of a local time.

    Raises:
        ConfigError: the text is neither; the message names the option.
    """
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return time.time() + parse_seconds(text, option)


def list_tasks(
    home: Path | None, *, everything: bool, user: str | None, states: list[str],
    labels: list[str], json: bool,
) -> None:  # fmt: skip
    """Prints the tasks that the options choose.

    Raises:
        ConfigError: a state is unknown.
    """
    for state in states:
        if state not in get_args(TaskState):
            known = ", ".join(get_args(TaskState))
            raise ConfigError(f"invalid --state {state!r}: expected one of {known}")
    client = Client(home)
    chosen = partial(
        client.tasks if json else client.task_lines,
        live=not everything and not states,
        user=user,
        states=cast(list[TaskState], states),
        labels=dict(label.partition("=")[::2] for label in labels),
    )
    found = chosen()
    show_result(found, lambda: tasks(cast(list[TaskLine], found)), json=json)


def why(found: WhyView, *, json: bool) -> None:
    show_result(found, lambda: _why_text(found), json=json)


def _why_text(found: WhyView) -> None:
    because = f": {found.text}" if found.text != found.state else ""
    hint = f"; `fireflyer resume {found.task}` queues it" if found.state == "suspended" else ""
    sys.stdout.write(plain(f"{found.task} is {found.state}{because}{hint}") + "\n")
    if found.state == "queued":
        when = "not known" if found.earliest is None else f"not before {_time(found.earliest)}"
        sys.stdout.write(f"expected to start: {when} (policy {found.policy})\n")


def nodes(found: list[NodeView], *, json: bool) -> None:
    show_result(found, lambda: _nodes_text(found), json=json)


def _nodes_text(found: list[NodeView]) -> None:
    zoned = any(node.zone for node in found)
    rows = []
    for node in found:
        reason = node.reason
        if node.until is not None:
            reason += f" (until {_time(node.until)})"
        gpus = f"{node.free}/{node.gpus} {node.gpu_type}".rstrip() if node.gpus else "-"
        zone = [node.zone or "-"] if zoned else []
        held = " ".join(node.tasks) or "-"
        rows.append((node.name, *zone, node.state, gpus, _free_memory(node), held, reason))
    heads = ["ZONE"] if zoned else []
    table(("NODE", *heads, "STATE", "FREE GPUS", "FREE MEMORY", "TASKS", "REASON"), rows)
    for unheld in sorted({node.unheld for node in found if node.unheld}):
        sys.stdout.write(plain(unheld) + "\n")


def _free_memory(node: NodeView) -> str:
    """Returns the free and the total memory, e.g. "48.0/64.0 GiB"."""
    if not node.memory_bytes:
        return "-"
    return f"{node.free_memory_bytes / GIB:.1f}/{node.memory_bytes / GIB:.1f} GiB"


def windows(found: list[WindowView], *, json: bool) -> None:
    def row(window: WindowView) -> tuple[str, ...]:
        times = (_time(window.begin), _time(window.end))
        owner = " ".join(filter(None, (window.user, window.group))) or "-"
        return (window.id, *times, " ".join(window.nodes), owner, window.reason)

    show_list(found, ("WINDOW", "FROM", "UNTIL", "NODES", "FOR", "REASON"), row, json=json)


def top(client: Client, *, once: bool, json: bool) -> None:
    """Prints tables of nodes and tasks; on a terminal, refreshes them every 2 s.

    With `json`, prints one object and returns.
    """
    if json:
        as_json({"nodes": client.nodes(), "tasks": client.task_lines(live=True)})
        return
    once = once or not sys.stdout.isatty()
    while True:
        live, found = client.task_lines(live=True), client.nodes()
        if not once:
            sys.stdout.write("\x1b[H\x1b[2J")
        counts: dict[str, int] = {}
        for view in live:
            counts[view.state] = counts.get(view.state, 0) + 1
        busy = sum(bool(node.tasks) for node in found)
        states = ", ".join(f"{number} {state}" for state, number in counts.items()) or "no tasks"
        sys.stdout.write(
            f"{time.strftime('%H:%M:%S')}  nodes {busy}/{len(found)} busy  {states}\n\n"
        )
        _nodes_text(found)
        sys.stdout.write("\n")
        tasks(live)
        sys.stdout.flush()
        if once:
            return
        time.sleep(REFRESH_S)


def _time(wall: float) -> str:
    """Returns the local time and its distance from now."""
    left = wall - time.time()
    away = f"in {age(left)}" if left >= 0 else f"{age(-left)} ago"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(wall)) + f" ({away})"
