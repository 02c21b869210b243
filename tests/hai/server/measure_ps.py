"""What `fireflyer ps` costs with thousands of tasks: `python -m tests.hai.server.measure_ps [--tasks 22000]`.

Fills a home's database with tasks that wait, serves it, and prints the median wall time of the whole
command, its start included, and of its parts: the start alone (`--version`), the answers of the server.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fireflyer.hai.client import Client
from fireflyer.hai.database.store import Fresh, Moment, Store
from fireflyer.hai.home import Home
from fireflyer.hai.lifecycle import Task, admit
from fireflyer.hai.model import TaskSpec

KEPT_BUSY = 64
"""Nodes that each task asks for: more than the server has, so that all of them wait."""


def fill(home: Home, count: int) -> None:
    """Writes `count` tasks of 20 users that wait."""
    home.create()
    store = Store(home.database)
    when = Moment(time.monotonic_ns(), time.time())
    for begin in range(0, count, 1000):
        fresh = []
        for number in range(begin, min(begin + 1000, count)):
            spec = TaskSpec(
                script="/home/ada/train.py", cwd="/home/ada", args=("--lr", f"{number}e-6"),
                name=f"sweep-{number}", nodes=KEPT_BUSY, labels={"sweep": f"{number % 50}"},
            )  # fmt: skip
            user = f"u{number % 20}"
            task = Task(id="", order=0, user=user, nodes=KEPT_BUSY, world=KEPT_BUSY, max_restarts=3)
            step = admit(task)
            fresh.append(Fresh(spec=spec, secret="0" * 32, step=step, when=when, user=user))
        store.add(fresh)
    store.close()


def median_ms(rounds: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Prints the medians, in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=22_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        fill(home, options.tasks)
        client = Client.connect(home.path)
        command = [sys.executable, "-m", "fireflyer.cli"]
        verbs = {
            "start alone": ["--version"],
            "ps": ["ps", "--home", str(home.path)],
            "ps --user": ["ps", "--user", "u3", "--home", str(home.path)],
            "ps --json": ["ps", "--json", "--home", str(home.path)],
        }
        try:
            for name, verb in verbs.items():
                took = median_ms(
                    options.rounds,
                    lambda verb=verb: subprocess.run(  # type: ignore[misc]
                        [*command, *verb], check=True, stdout=subprocess.DEVNULL
                    ),
                )
                print(f"{name:<14}{took:8.0f} ms", flush=True)
            took = median_ms(options.rounds, lambda: client.tasks(live=True, brief=True))
            print(f"{'answers alone':<14}{took:8.0f} ms")
        finally:
            client.shutdown(keep=True)


if __name__ == "__main__":
    main()
