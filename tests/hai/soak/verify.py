"""What must hold once every task of a storm is over."""

import os
from collections import Counter
from pathlib import Path

import msgspec
from tests.hai.soak.target import Platform
from tests.hai.soak.work import lines

from fireflyer.hai.client import Client
from fireflyer.hai.model import TERMINAL, Event, TaskView

HOME = {
    "hai.sqlite", "hai.sqlite-wal", "hai.sqlite-shm", "server.lock", "start.lock", "server.json", "token",
    "engine.json", "policy", "database.json", "tasks", "workspaces", "server.log", "validator.jsonl",
}  # fmt: skip


class Verdict(msgspec.Struct):
    """What was found.

    Attributes:
        finished: tasks.
        unacknowledged: tasks of which nobody was told, since the server died before its answer.
        attempts: by outcome.
        again: attempts that found the work of one done that was killed before its end was known.
        newcomers: of elastic tasks, let in.
        events: of the kinds that a storm is to bring about.
        problems: what was lost, done twice or left behind.
    """

    finished: int = 0
    unacknowledged: int = 0
    attempts: dict[str, int] = {}
    again: int = 0
    newcomers: int = 0
    events: dict[str, int] = {}
    problems: list[str] = []


def history_of(client: Client) -> list[Event]:
    found: list[Event] = []
    while more := client.events(after=found[-1].seq if found else 0):
        found += more
    return found


def verify(platform: Platform, acknowledged: dict[str, str]) -> Verdict:
    """REQUIRES: no task is live."""
    client = platform.client
    views = {view.id: view for view in client.tasks()}
    histories: dict[str, list[Event]] = {name: [] for name in views}
    for event in history_of(client):
        histories[event.task].append(event)
    problems = [f"{name} was acknowledged and is not known" for name in acknowledged.keys() - views]
    again = 0
    for name, view in views.items():
        problems += [f"{name}: {text}" for text in _history(view, histories[name])]
        problems += [f"{name}: {text}" for text in _output(view, histories[name])]
        again += len(lines(_folder(view) / "again"))
    everything = [event for history in histories.values() for event in history]
    ends = Counter(e.detail["outcome"] for e in everything if e.kind == "gang_ended")
    told = ("suspending", "preempted", "restarting", "resumed", "rank_joined", "observed")
    return Verdict(
        finished=sum(view.state == "finished" for view in views.values()),
        unacknowledged=len(views.keys() - acknowledged.keys()),
        attempts=dict(ends),
        again=again,
        newcomers=sum(event.kind == "rank_joined" for event in everything),
        events=dict(Counter(event.kind for event in everything if event.kind in told)),
        problems=problems,
    )


def _folder(view: TaskView) -> Path:
    return Path(view.directory) / "output"


def _history(view: TaskView, events: list[Event]) -> list[str]:
    """One end, the last word; attempts one after the other, each ended, the last one by finishing."""
    found: list[str] = []
    if view.state != "finished":
        found.append(f"is {view.state}: {view.reason}")
    if sum(event.kind in TERMINAL for event in events) != 1 or events[-1].kind != view.state:
        found.append("has not exactly one end")
    frame = [(e.kind, e.attempt) for e in events if e.kind in ("starting", "gang_ended")]
    whole = [(k, n) for n in range(1, view.attempt + 1) for k in ("starting", "gang_ended")]
    if frame != whole:
        found.append(f"has attempts out of order: {frame}")
    outcomes = [event.detail["outcome"] for event in events if event.kind == "gang_ended"]
    if outcomes.count("finished") != 1 or outcomes[-1:] != ["finished"]:
        found.append(f"has attempts that ended {outcomes}")
    refused = [e for e in events if "cannot start" in e.detail.get("reason", "")]
    if refused:
        found.append(f"attempt {refused[0].attempt}: {refused[0].detail['reason']}")
    return found


def _output(view: TaskView, events: list[Event]) -> list[str]:
    """Its work was completed once, by an attempt of which that is known, or whose death explains why not; no
    attempt came after; no place was ever taken twice."""
    found: list[str] = []
    output = _folder(view)
    ends = {e.attempt: e.detail["outcome"] for e in events if e.kind == "gang_ended"}
    done, again = lines(output / "done"), lines(output / "again")
    if len(done) != 1:
        found.append(f"was completed {len(done)} times: {done}")
    ran = [line.attempt for line in (*done, *again)]
    if ran and (ran != sorted(set(ran)) or ran[-1] != view.attempt):
        found.append(f"attempts {ran} got to the end, of {view.attempt}")
    if any(ends.get(attempt) == "finished" for attempt in ran[:-1]):
        found.append("was started again after it had finished")
    if overlap := lines(output / "overlap"):
        found.append(f"two processes in one place: {overlap}")
    begun = Counter(lines(output / "begun"))
    if twice := [line for line, times in begun.items() if times > 1]:
        found.append(f"was started twice: {twice}")
    places = {line.place for line in begun if line.attempt == view.attempt}
    if view.spec.elastic:  # one killed before its first line; the others go on
        last = [e for e in events if e.kind == "rank_exited" and e.attempt == view.attempt]
        places |= {e.detail["rank"] for e in last if e.detail["code"] is None}
    if places != set(range(view.spec.nodes * view.spec.ranks_per_node)):
        found.append("finished without some of its ranks")
    return found


def left_behind(platform: Platform) -> list[str]:
    """REQUIRES: server and tasks have ended."""
    found = [f"{p.role} {p.pid} of {p.task} is left" for p in platform.processes()]
    found += [f"{name} is left" for name in platform.shared if os.path.exists(name)]
    found += [f"{path} is left" for path in platform.temporary.iterdir()]
    home = platform.home
    found += [f"{path} is left" for path in home.iterdir() if path.name not in HOME]
    for task in (home / "tasks").iterdir():
        for path in task.iterdir():
            known = path.name == "output" or path.name.isdigit()
            known |= path.name.endswith((".sock", ".supervisor.log"))
            if not known:
                found.append(f"{path} is left")
    return found
