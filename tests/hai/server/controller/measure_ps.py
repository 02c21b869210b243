"""Cost of `fireflyer ps` with thousands of tasks.

    python -m tests.hai.server.controller.measure_ps [--tasks 22000]

Fills a home's database with tasks, serves it, and prints the median wall and CPU time of the whole
command, its start included; "start alone" is `--version`. One task runs; the others wait for its
nodes, and the server explains why each of them waits.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from fireflyer.hai.client import Client
from fireflyer.hai.database.store import Moment, NewTask, Store
from fireflyer.hai.home import Home
from fireflyer.hai.lifecycle import Task, admit
from fireflyer.hai.model import TERMINAL, TaskSpec

NODES = 2
"""Nodes of the server, and of each task."""


def fill(home: Home, count: int) -> None:
    """Writes `count` tasks of 20 users that wait."""
    home.create()
    script = home.path / "train.py"
    script.write_text("import time\n\ntime.sleep(3600)\n")
    store = Store(home.database)
    when = Moment(time.monotonic_ns(), time.time())
    for begin in range(0, count, 1000):
        fresh = []
        for number in range(begin, min(begin + 1000, count)):
            spec = TaskSpec(
                script=str(script), cwd=str(home.path), args=("--lr", f"{number}e-6"),
                name=f"sweep-{number}", nodes=NODES, labels={"sweep": f"{number % 50}"},
            )  # fmt: skip
            user = f"u{number % 20}"
            task = Task(id="", order=0, user=user, nodes=NODES, world=NODES, max_restarts=3)
            step = admit(task)
            fresh.append(NewTask(spec=spec, secret="0" * 32, step=step, when=when, user=user))
        store.add(fresh)
    store.close()


def medians_ms(rounds: int, server: psutil.Process, work: Callable[[], object]) -> list[float]:
    """Wall time, CPU time of the processes that `work` starts, CPU time of the server."""

    def now() -> tuple[float, float, float]:
        mine, its = os.times(), server.cpu_times()
        children = mine.children_user + mine.children_system
        return time.perf_counter(), children, its.user + its.system

    taken = []
    for _ in range(rounds):
        begin = now()
        work()
        taken.append([(end - start) * 1e3 for start, end in zip(begin, now(), strict=True)])
    return list(map(statistics.median, zip(*taken, strict=True)))


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
        server = psutil.Process(client.server().pid)
        command = [sys.executable, "-m", "fireflyer.cli"]
        verbs = {
            "start alone": ["--version"],
            "ps": ["ps", "--home", str(home.path)],
            "ps --user": ["ps", "--user", "u3", "--home", str(home.path)],
            "ps --json": ["ps", "--json", "--home", str(home.path)],
        }
        try:
            for name, verb in verbs.items():
                wall, cpu, its = medians_ms(
                    options.rounds,
                    server,
                    lambda verb=verb: subprocess.run(  # type: ignore[misc]
                        [*command, *verb], check=True, stdout=subprocess.DEVNULL
                    ),
                )
                print(
                    f"{name:<14}{wall:8.0f} ms, CPU{cpu:6.0f} ms, of the server{its:6.0f} ms",
                    flush=True,
                )
        finally:
            for node in client.nodes():
                client.drain(node.name, "the measurement is over")
            client.stop("t1")
            client.wait("t1", TERMINAL)
            client.shutdown(keep=True)


if __name__ == "__main__":
    main()
