"""Printing of tasks, nodes and events as tables or JSON."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from fireflyer.errors import FireflyerError
from fireflyer.hai.model import Event, RankView, TaskLine, TaskSpec, TaskState, TaskView
from fireflyer.program import error_fields, plain, text, write_json

STYLES = {
    "running": "green",
    "finished": "green",
    "failed": "red",
    "stopped": "yellow",
    "suspended": "cyan",
    "suspending": "cyan",
    "queued": "blue",
    "starting": "blue",
}

STYLED = ("STATE", "EVENT")
"""Columns with styled cells."""

UNLIMITED = 1 << 30

T = TypeVar("T")


def show_result(found: Any, show_text: Callable[[], object], *, json: bool) -> None:
    """Prints the result of a verb.

    Args:
        found: the result; with `json` it is printed as one JSON document on a line.
        show_text: prints the result as tables and lines for people.
        json: the verb's `--json`.
    """
    if json:
        as_json(found)
    else:
        show_text()


def show_list(
    found: Sequence[T], heads: Sequence[str], row: Callable[[T], Sequence[str]], *, json: bool
) -> None:
    """Prints a list as JSON, or as a table in which `row` gives the cells of each entry."""
    show_result(found, lambda: table(heads, [row(one) for one in found]), json=json)


def show_lines(found: Iterable[T], line: Callable[[T], str], *, json: bool) -> None:
    """Prints a stream: each entry as an object or as a line of text, as soon as it is known."""
    for one in found:
        if json:
            as_json(one)
        else:
            sys.stdout.write(plain(line(one)) + "\n")
        sys.stdout.flush()


def as_json(value: Any) -> None:
    """Writes one line of JSON to stdout."""
    write_json(msgspec.json.encode(value))


def task_error(task: str, error: FireflyerError) -> None:
    """Writes one line of JSON: the error that a request for one of several tasks met."""
    as_json({"task": text(task), "error": error_fields(type(error).__name__, str(error))})
    sys.stdout.flush()


def tasks(found: list[TaskLine]) -> None:
    now = time.time()
    rows = [
        (
            line.id,
            line.name,
            line.state,
            f"{line.nodes} x {line.ranks_per_node}",
            gpus(line.state, line, line.placement, line.devices),
            str(line.attempt),
            str(line.restarts),
            age(now - line.created),
            line.reason,
        )
        for line in found
    ]
    table(("TASK", "NAME", "STATE", "RANKS", "GPUS", "ATTEMPT", "RESTARTS", "AGE", "REASON"), rows)


def task(view: TaskView, *, json: bool) -> None:
    show_result(view, lambda: _task_text(view), json=json)


def _task_text(view: TaskView) -> None:
    lines = [
        ("task", f"{view.id}  {title(view)}"),
        ("state", view.state + (f": {view.reason}" if view.reason else "")),
        ("script", " ".join([view.spec.script, *view.spec.args])),
        ("attempt", f"{view.attempt}, restarts {view.restarts} of {view.spec.max_restarts}"),
        ("directory", view.directory),
    ]
    if view.spec.gpus or view.devices:
        lines.insert(3, ("GPUs", gpus(view.state, view.spec, view.nodes, view.devices)))
    if view.limits:
        lines.append(("limits", view.limits))
    if view.node_faults or view.avoid:
        avoided = f"; avoids {', '.join(view.avoid)}" if view.avoid else ""
        lines.insert(
            4, ("faults", f"{view.node_faults} of {view.spec.max_node_faults} of nodes{avoided}")
        )
    if view.generation:
        lines.insert(4, ("members", _members(view.generation, view.members)))
    for name, value in lines:
        sys.stdout.write(f"{name:<10} {plain(value)}\n")
    if view.ranks:
        rows = [
            (
                str(rank.rank),
                rank.node,
                str(rank.pid or "-"),
                _rank_state(rank),
                rank.log,
            )
            for rank in view.ranks
        ]
        table(("RANK", "NODE", "PID", "STATE", "LOG"), rows)


def gpus(
    state: TaskState,
    asked: TaskSpec | TaskLine,
    nodes: Sequence[str],
    devices: Sequence[Sequence[int]],
) -> str:
    """Returns the GPUs that a task holds, e.g. "n0:2,3"; if it holds none, the GPUs that it
    requests."""
    if devices and state in ("starting", "running", "suspending"):
        held = zip(nodes, devices, strict=True)
        return " ".join(f"{node}:{','.join(map(str, each))}" for node, each in held if each)
    if not asked.gpus:
        return "-"
    kind = f"{asked.gpu_type}:" if asked.gpu_type else ""
    times = f"{asked.nodes} x " if asked.nodes > 1 else ""
    return f"{times}{kind}{asked.gpus}"


def events(found: list[Event], *, json: bool) -> None:
    show_list(found, ("SEQ", "TIME", "TASK", "ATTEMPT", "EVENT", "DETAIL"), _event_row, json=json)


def _event_row(event: Event) -> tuple[str, ...]:
    when, attempt = clock(event.wall), str(event.attempt)
    return (str(event.seq), when, event.task, attempt, event.kind, details(event))


def event_line(event: Event) -> str:
    """Returns an event as one line of a stream."""
    head = f"{clock(event.wall)} {event.task} attempt {event.attempt} {event.kind}"
    return plain(f"{head} {details(event)}".rstrip())


def details(event: Event) -> str:
    """Describes the detail of an event in words."""
    detail = event.detail
    if event.kind == "rank_exited":
        end = "suspended" if detail["suspended"] else f"exit {detail['code']}"
        if detail["signal"] is not None:
            end = f"signal {detail['signal']}"
        elif detail["code"] is None:
            end = "lost"
        return f"{_rank(detail)}: {end}"
    if event.kind == "rank_started":
        return f"{_rank(detail)}: pid {detail['pid']}"
    if event.kind == "rank_joined":
        return _rank(detail)
    if event.kind == "leased":
        return _members(detail["generation"], detail["members"])
    if event.kind == "starting":
        return "on " + " ".join(detail["nodes"])
    if event.kind == "restarting":
        return f"{detail['restarts']} of {detail['max_restarts']}: {detail['reason']}"
    if event.kind in ("observed", "acted"):
        return fault(event)
    return str(detail.get("reason", ""))


def fault(event: Event) -> str:
    """Describes an observed fault, or the action that was taken."""
    detail = event.detail
    node = f"{detail['node']}: " if detail.get("node") else ""
    if event.kind == "observed":
        return f"{node}{detail['text']}"
    return f"{node}{detail['action']}" + (f" (rule {detail['rule']})" if detail["rule"] else "")


def _rank(detail: dict[str, Any]) -> str:
    again = f" (newcomer {detail['incarnation']})" if "incarnation" in detail else ""
    return f"rank {detail['rank']} on {detail['node']}{again}"


def _members(generation: int, members: Sequence[str]) -> str:
    return f"generation {generation}: {', '.join(members)}"


def title(view: TaskView) -> str:
    return view.spec.name or view.spec.script.rsplit("/", 1)[-1]


def clock(wall: float) -> str:
    """Returns the local time to the millisecond."""
    return time.strftime("%H:%M:%S", time.localtime(wall)) + f".{int(wall % 1 * 1000):03d}"


def age(seconds: float) -> str:
    """Returns a rounded duration, e.g. "42s", "7m", "3h", "2d"."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(int(seconds), 0)}s"


def _rank_state(rank: RankView) -> str:
    state = rank.ended or ("starting" if rank.pid is None else "running")
    if rank.step is not None:
        state += f", step {rank.step}"
    if rank.slower:
        state += f", straggler ({rank.slower:.1f} x)"
    if not rank.incarnation:
        return state
    return f"{state}, newcomer {rank.incarnation}" + ("" if rank.member else ", not admitted")


def width() -> int:
    """Returns the columns of the terminal; without a terminal, `UNLIMITED`."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal else UNLIMITED


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a plain table, unlimited in width if stdout is no terminal. Cells are never markup."""
    from fireflyer.cli.tables import align, lay_out

    cells = [[plain(cell) for cell in row] for row in rows]
    if width() == UNLIMITED:  # thousands of rows in a fraction of rich's time
        sys.stdout.write("".join(f"{line}\n" for line in align(heads, cells)))
        return
    from rich.console import Console
    from rich.text import Text

    top, lines = lay_out(heads, cells, width())
    shown = Text("".join(cell.text for cell in top).rstrip(), style="bold")
    for line in lines:
        shown.append("\n", style="not bold")
        for cell, column in line:
            shown.append(cell, style=_style(heads[column], cell.strip()))
    Console(highlight=False).print(shown, soft_wrap=True)


def _style(head: str, text: str) -> str:
    return f"not bold {STYLES.get(text, '')}" if head in STYLED else "not bold"
