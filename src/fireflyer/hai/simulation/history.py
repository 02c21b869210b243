"""Reader of `fireflyer events --json` as a trace: the requests of the platform's own tasks, and
their work time.

The input is an array, as `events --json` prints it, or an object per line, as `events -f --json`
prints it. Tasks that have not ended yet, or never ran, are left out.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from fireflyer.hai.simulation.trace import Record, Source

ENDED = ("finished", "failed", "stopped")


class HistoryEvent(msgspec.Struct, frozen=True):
    """Fields of `hai.model.Event` that a trace needs."""

    task: str
    kind: str
    wall: float
    attempt: int = 0
    detail: dict[str, Any] = {}


class _Chain(msgspec.Struct):
    """A task as reconstructed from its events."""

    task: str
    submitted: float | None = None
    about: dict[str, Any] = {}
    nodes: int = 0
    running: float | None = None
    worked_s: float = 0.0
    ended: bool = False

    def take(self, event: HistoryEvent) -> None:
        detail = event.detail
        match event.kind:
            case "submitted":
                self.submitted = event.wall
                self.about = detail
            case "starting":
                placed = detail.get("nodes")
                self.nodes = len(placed) if isinstance(placed, list) else self.nodes
            case "running":
                self.running = event.wall
            case "gang_ended":
                self._pause(event.wall)
            case kind if kind in ENDED:
                self._pause(event.wall)
                self.ended = True

    def _pause(self, wall: float) -> None:
        if self.running is not None:
            self.worked_s += max(wall - self.running, 0.0)
            self.running = None


def records(source: Source, text: str) -> Iterator[Record]:
    """Yields the tasks that ended.

    Raises:
        TraceError: the text is not a list of events.
    """
    chains: dict[str, _Chain] = {}
    for event in _events(source, text):
        chains.setdefault(event.task, _Chain(event.task)).take(event)
    for chain in chains.values():
        if not chain.ended:
            source.left_out["not over yet"] += 1
        elif chain.submitted is None:
            source.left_out["whose submission is not in the file"] += 1
        elif not chain.worked_s or not chain.nodes:
            source.left_out["that never ran"] += 1
        else:
            about = chain.about
            each = about.get("gpus")
            yield Record(
                name=chain.task, submit_s=chain.submitted, run_s=chain.worked_s,
                gpus=each * chain.nodes if isinstance(each, int) and each > 0 else 0,
                gpu_type=_text(about, "gpu_type"), nodes=chain.nodes,
                user=_text(about, "user"), group=_text(about, "group"),
                priority=_text(about, "priority") or "normal",
            )  # fmt: skip


def _text(about: dict[str, Any], key: str) -> str:
    value = about.get(key)
    return value if isinstance(value, str) else ""


def _events(source: Source, text: str) -> Iterator[HistoryEvent]:
    if text.lstrip().startswith("["):
        try:
            yield from msgspec.json.decode(text, type=list[HistoryEvent])
        except (msgspec.DecodeError, RecursionError) as error:
            raise source.damaged(1, f"the file is not a list of events: {error}") from None
        return
    decoder = msgspec.json.Decoder(HistoryEvent)
    for number, row in enumerate(text.splitlines(), start=1):
        if row.strip():
            try:
                yield decoder.decode(row)
            except (msgspec.DecodeError, RecursionError) as error:
                raise source.damaged(number, f"the line is not an event: {error}") from None
