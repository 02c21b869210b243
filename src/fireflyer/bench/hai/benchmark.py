"""Costs of the platform itself: task start, supervisor memory, death detection and suspend.

The time of a start begins before the engine exists and ends with the first line that the task prints.
The time of a suspend ends when the nodes are free. The engine is measured alone, and also through a
server and its client, as users run them. Ranks do almost nothing: they log when they began and how
long their save took, by the machine's monotonic clock.
"""

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from fireflyer.bench.harness import goals
from fireflyer.bench.harness.report import Row
from fireflyer.errors import FireflyerError
from fireflyer.hai.client import Client
from fireflyer.hai.engines.local import LocalEngine
from fireflyer.hai.home import EngineFile
from fireflyer.hai.model import TERMINAL, Event, TaskSpec
from fireflyer.hai.model.engine import Gang, GangEnded, RankStarted

NODES, RANKS = 2, 2
SAVE_S = 0.2
LIMIT_S = 60.0

FIRST = "import time; print(time.monotonic_ns(), flush=True)\n"

WORK = f"""\
import time
from fireflyer import hai
hai.suspend_requested()
print("working", flush=True)
while not hai.suspend_requested():
    time.sleep(0.01)
told = time.monotonic_ns()
time.sleep({SAVE_S})
print(time.monotonic_ns() - told, flush=True)
hai.suspended()
"""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the benchmark."""

    rounds: int
    slurm: bool
    """Engine: True for the Slurm cluster configured on this machine, False for the local engine."""


def run(spec: Spec, tell: Callable[[str], None]) -> list[Row]:
    """Runs all measurements and returns their rows.

    Raises:
        FireflyerError: a task did not behave as expected.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ffhai") as name:
        folder = Path(name)
        for file, text in (("first.py", FIRST), ("work.py", WORK)):
            (folder / file).write_text(text)
        if not spec.slurm:
            rows += _starts(spec, folder, tell)
            tell("the first task: without a server")
            rows.append(_first_task(folder, spec.rounds))
        with _server(folder / "home", spec) as client:
            rows += _work(client, folder / "work.py", spec, tell)
    return rows


def _rows(case: str, unit: str, values: list[float], allowed: float) -> list[Row]:
    """Returns a row for the median and, for at least 100 values, a row for the 99th percentile."""
    rows = [Row.of_times(case, unit, values, "allowed", [allowed], goal=1.0)]
    if len(values) >= 100:
        p99 = statistics.quantiles(values, n=100)[-1]
        rows.append(Row.of_times(f"{case}, p99", unit, [p99], "allowed", [allowed], goal=1.0))
    return rows


# -- the engine alone --------------------------------------------------------------------------------


def _starts(spec: Spec, folder: Path, tell: Callable[[str], None]) -> list[Row]:
    started: list[float] = []
    first: list[float] = []
    alone: list[float] = []
    for number in range(spec.rounds):
        tell(f"start: {number + 1} of {spec.rounds}")
        begun = time.monotonic_ns()
        told, line = asyncio.run(_start(folder, number))
        started.append((told - begun) / 1e6)
        first.append((line - begun) / 1e6)
        begun = time.monotonic_ns()
        line = int(subprocess.check_output([sys.executable, str(folder / "first.py")]))
        alone.append((line - begun) / 1e6)
    case = "engine, from nothing to its rank"
    return [
        *_rows(f"{case} started", "ms", started, goals.HAI_START_MS),
        *_rows(f"{case}'s first line", "ms", first, goals.HAI_START_MS),
        Row.of_times(f"{case}'s first line", "ms", first, "python alone", alone),
    ]


async def _start(folder: Path, number: int) -> tuple[int, int]:
    """Starts a rank on the local engine.

    Returns:
        Monotonic times in ns of the engine's report of the rank, and of the rank's first line.
    """
    engine = LocalEngine(1, preload=())
    task = f"t{number + 1}"
    gang = Gang(
        task=task, attempt=1, script=str(folder / "first.py"), args=(), cwd=str(folder), env=dict(os.environ),
        nodes=("n0",), ranks_per_node=1, start="exec", secret="0" * 64, directory=folder / task / "1",
    )  # fmt: skip
    told = 0
    try:
        await engine.launch(gang)
        async for event in engine.events():
            if isinstance(event, RankStarted):
                told = time.monotonic_ns()
            elif isinstance(event, GangEnded):
                break
        line = int((gang.directory / "0.log").read_text())
    finally:
        await engine.release(task)
        await engine.close()
    return told, line


# -- a server and its client -------------------------------------------------------------------------


def _first_task(folder: Path, rounds: int) -> Row:
    """Measures one `fireflyer run` from its start, when no server runs, to the end of the task."""
    took: list[float] = []
    for number in range(min(rounds, 5)):
        home = folder / f"first{number}"
        command = [sys.executable, "-P", "-m", "fireflyer.cli", "run", "--home", str(home)]
        begun = time.monotonic()
        command += ["--start", "exec", str(folder / "first.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        took.append((time.monotonic() - begun) * 1e3)
        if done.returncode:
            raise FireflyerError(f"`fireflyer run` failed: {done.stderr.strip()}")
        Client(home).shutdown()
    case = "`fireflyer run`, no server yet, to the end of the task"
    return Row.of_times(case, "ms", took, "-", [])


@contextlib.contextmanager
def _server(home: Path, spec: Spec) -> Iterator[Client]:
    """Runs a server in the background, with its own home, until the context ends."""
    client = Client(home)
    if spec.slurm:
        client.home.create()
        client.home.write_engine(EngineFile(engine="slurm"))
    client = Client.connect(home, nodes=NODES)
    try:
        yield client
    finally:
        client.shutdown()


def _work(client: Client, script: Path, spec: Spec, tell: Callable[[str], None]) -> list[Row]:
    """Runs one task; repeatedly kills one of its ranks and suspends the task."""
    task = client.submit(
        TaskSpec(
            script=str(script), cwd=str(script.parent), nodes=NODES, ranks_per_node=RANKS, start="exec",
            max_restarts=1_000_000, max_node_faults=1_000_000,
        )
    ).id  # fmt: skip
    memory: dict[str, list[float]] = {"PSS": [], "RSS": []}
    seen: list[float] = []
    told: list[float] = []
    freed: list[float] = []
    for number in range(spec.rounds):
        tell(f"death and suspend: {number + 1} of {spec.rounds}")
        _running(client, task, 2 * number + 1)
        for kind, value in _memory(client, task).items():
            memory[kind].append(value)
        first, later = _kill(client, task)
        seen.append(first)
        told.append(later)
        _running(client, task, 2 * number + 2)
        freed.append(_suspend(client, task))
        client.resume(task)
    client.stop(task)
    client.wait(task, TERMINAL, LIMIT_S)
    engine = "slurm" if spec.slurm else "local"
    allowed = goals.HAI_SUSPEND_MS[engine]
    return [
        *(
            row
            for kind, values in memory.items()
            for row in _rows(f"memory of a supervisor, {kind}", "MB", values, goals.HAI_MEMORY_MB)
        ),
        *_rows("SIGKILL of a rank, to its record", "ms", seen, goals.HAI_DEATH_MS),
        *_rows("SIGKILL of a rank, to a client's answer", "ms", told, goals.HAI_DEATH_MS),
        *_rows(f"suspend ({engine}), to nodes free, without the save", "ms", freed, allowed),
    ]


def _running(client: Client, task: str, attempt: int) -> None:
    """Waits until this attempt is running and its ranks are working."""
    deadline = time.monotonic() + LIMIT_S
    view, seq = client.task_at(task)
    while not (view.state == "running" and view.attempt == attempt):
        if time.monotonic() > deadline or view.state in TERMINAL:
            raise FireflyerError(f"{task} is {view.state} in attempt {view.attempt}: {view.reason}")
        news = client.events(task=task, after=seq, wait_s=1.0)
        seq = news[-1].seq if news else seq
        view = client.task(task)
    while not all("working" in Path(rank.log).read_text() for rank in view.ranks):
        if time.monotonic() > deadline:
            raise FireflyerError(f"the ranks of {task} did not start in time; see {view.directory}")
        time.sleep(0.01)


def _next(client: Client, task: str, seq: int, kind: str) -> Event:
    """Returns the next event of this kind after `seq`."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        news = client.events(task=task, after=seq, wait_s=1.0)
        for event in news:
            if event.kind == kind:
                return event
        seq = news[-1].seq if news else seq
    raise FireflyerError(f"{task}: no {kind} within {LIMIT_S:.0f} s")


def _kill(client: Client, task: str) -> tuple[float, float]:
    """Kills a rank.

    Returns:
        Milliseconds from SIGKILL to the supervisor's record, and to the client's view of it.
    """
    view, seq = client.task_at(task)
    victim = view.ranks[-1].pid
    assert victim is not None
    begun = time.monotonic_ns()
    os.kill(victim, signal.SIGKILL)
    event = _next(client, task, seq, "rank_exited")
    now = time.monotonic_ns()
    return (event.monotonic_ns - begun) / 1e6, (now - begun) / 1e6


def _suspend(client: Client, task: str) -> float:
    """Suspends the task.

    Returns:
        Milliseconds from the request to the end of the gang, minus the longest save of a rank.
    """
    view, seq = client.task_at(task)
    begun = time.monotonic_ns()
    client.suspend(task)
    ended = _next(client, task, seq, "gang_ended")
    saves = [int(Path(rank.log).read_text().split()[-1]) for rank in view.ranks]
    client.wait(task, {"suspended"}, LIMIT_S)
    return (ended.monotonic_ns - begun - max(saves)) / 1e6


def _memory(client: Client, task: str) -> dict[str, float]:
    """Returns the memory of the task's largest supervisor, in MB (10^6 bytes)."""
    pids = {_parent(rank.pid) for rank in client.task(task).ranks if rank.pid is not None}
    found = [_rollup(pid) for pid in pids]
    return {
        "PSS": max(one["Pss"] for one in found) * 1024 / 1e6,
        "RSS": max(one["Rss"] for one in found) * 1024 / 1e6,
    }


def _parent(pid: int) -> int:
    """Returns the parent of a process; the parent of an exec'd rank is its supervisor."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def _rollup(pid: int) -> dict[str, int]:
    """Returns the memory figures of a process in KiB, by name."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = (line.split() for line in lines)
    return {name.rstrip(":"): int(value) for name, value, *_ in fields}
