"""Kills of everything on the local engine: `python -m tests.hai.soak.soak --seconds 600 --seed 1`.

See docs/benchmarks/hai-soak.md. Ends with 1 if a task was lost, done twice or left something behind; prints
JSON.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tests.hai.server.database.postgres import Postgres, missing
from tests.hai.soak.storm import Killer, Users
from tests.hai.soak.target import Platform
from tests.hai.soak.verify import Verdict, left_behind, verify

from fireflyer.errors import FireflyerError
from fireflyer.hai.database.connection import PostgreSQL

STUCK_S = 90.0
"""After the last blow every task is over within that."""

LAST = 60


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How hard a run is."""

    nodes: int = 6
    waiting: int = 8
    """Tasks that are not over, at a time."""
    every_s: float = 1.2
    """Between two blows, on average."""
    blows: int = 1
    """At least so many."""


class Summary(msgspec.Struct):
    """What a run did and found.

    Attributes:
        kills: processes killed, by role. blows: of one or more at once, by kind.
        asked: suspends and resumes, and what was refused or not answered.
        tasks: acknowledged, by kind.
        calm_s: from the last blow until every task was over.
        history: the blows, where there are problems.
    """

    seconds: float
    seed: int
    kills: dict[str, int]
    blows: dict[str, int]
    asked: dict[str, int]
    tasks: dict[str, int]
    calm_s: float
    verdict: Verdict
    problems: list[str]
    history: list[str]


def soak(
    seconds: float, seed: int, folder: Path, pace: Pace, database: PostgreSQL | None = None
) -> Summary:
    """One run, in an empty folder. Raises AssertionError where it cannot even be finished."""
    platform = Platform(folder, pace.nodes, database)
    try:
        platform.up()
        users = Users(platform.client, seed, pace.waiting)
        killer = Killer(platform, seed, pace.every_s)
        users.start()
        try:
            killer.run(seconds, pace.blows)
        finally:
            users.stop()
        problems = [*users.problems, *killer.problems]
        begun = time.monotonic()
        problems += _calm(platform, begun + STUCK_S)
        calm_s = time.monotonic() - begun
        verdict = verify(platform, users.acknowledged) if not problems else Verdict()
        problems += verdict.problems
        problems += _released(platform, begun + STUCK_S)
        platform.client.shutdown()
        problems += left_behind(platform)
    finally:
        platform.end()
    kinds = list(users.acknowledged.values())
    return Summary(
        seconds=seconds,
        seed=seed,
        kills=dict(killer.kills),
        blows=dict(killer.blows),
        asked=dict(users.asked),
        tasks={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        calm_s=round(calm_s, 2),
        verdict=verdict,
        problems=problems,
        history=killer.history[-LAST:] if problems else [],
    )


def _calm(platform: Platform, deadline: float) -> list[str]:
    """Waits until every task is over; what is not."""
    client = platform.client
    while live := client.tasks(live=True):
        if time.monotonic() >= deadline:
            return [f"stuck: {v.id} {v.spec.args} is {v.state}: {v.reason}" for v in live]
        for view in live:
            if view.state == "suspended":
                with contextlib.suppress(FireflyerError):
                    client.resume(view.id)
        client.events(after=client.task_at("t1")[1], wait_s=1.0)
    return []


def _released(platform: Platform, deadline: float) -> list[str]:
    """Waits until nothing but the server runs: what was kept warm for tasks is given back."""
    while left := [process for process in platform.processes() if process.role != "server"]:
        if time.monotonic() >= deadline:
            return [f"{p.role} {p.pid} of {p.task} on {p.node} is not released" for p in left]
        time.sleep(0.05)
    return []


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=1.2, help="seconds between two blows")
    parser.add_argument("--folder", type=Path, help="kept; by default a temporary one")
    parser.add_argument("--postgresql", action="store_true", help="in a PostgreSQL of its own")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("soak: ended by SIGTERM"))
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hai-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        database = stack.enter_context(_database()) if options.postgresql else None
        pace = Pace(every_s=options.every)
        summary = soak(options.seconds, options.seed, folder, pace, database)
    print(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
    print("soak: ok" if not summary.problems else "soak: FAILED")
    return 1 if summary.problems else 0


@contextlib.contextmanager
def _database() -> Iterator[PostgreSQL]:
    if why := missing():
        sys.exit(why)
    with tempfile.TemporaryDirectory(prefix="ffpg") as root:
        postgres = Postgres(Path(root))
        postgres.start()
        try:
            postgres.create("soak")
            yield PostgreSQL(url=postgres.url("soak"))
        finally:
            postgres.stop()


if __name__ == "__main__":
    sys.exit(main())
