"""What sampling costs: `python -m tests.hai.server.controller.measure_sampling [--ranks 8 --samples 300]`.

Prints the CPU time of a sample of `--ranks` ranks with a child process each, as a share of a core at one
sample a second, and what the series of one task and its ranks add to the database in a day and in the long
run. Values are random, which no compression shortens; a real series is smaller.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sqlalchemy as sa

from fireflyer.hai.database.connection import Database
from fireflyer.hai.database.samples import Samples
from fireflyer.hai.database.schema import sample as table
from fireflyer.hai.sampling.series import LEVELS, METRICS, point
from fireflyer.hai.sampling.usage import Sampler, usage_path

DAY_S = 86_400
NOON = 1_800_000_000.0  # begins a chunk of each level

RANK = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print("ready", flush=True)
sys.stdin.read()
"""


def cpu(ranks: int, samples: int, folder: Path) -> float:
    """CPU seconds of a sample."""
    command = [sys.executable, "-c", RANK]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(ranks)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    sampler = Sampler(usage_path(folder, "n0"), "n0")
    running = {process.pid: rank for rank, process in enumerate(processes)}
    sampler.sample(running, 0.0)  # the first one imports what it needs
    begin = time.process_time()
    for number in range(samples):
        sampler.sample(running, float(number + 1))
    took = (time.process_time() - begin) / samples
    for process in processes:
        process.communicate()
    return took


def growth(ranks: int, folder: Path) -> tuple[int, dict[int, int]]:
    """Bytes that a day of one task adds, and those of each level."""
    draw = random.Random(1)
    database = Database(folder / "hai.sqlite")
    samples = Samples(database)
    mine = ("cpu", "memory", "read", "written", "gpu", "gpu_memory", "step", "loss", "speed")
    rank = ("cpu", "memory", "read", "written", "step", "loss", "speed")
    assert set(mine) | set(rank) <= set(METRICS)
    for minute in range(DAY_S // LEVELS[0]):
        points = {"task:t1": point(held=8, **{name: draw.random() for name in mine})}
        for number in range(ranks):
            points[f"rank:t1/{number}"] = point(**{name: draw.random() for name in rank})
        samples.add(NOON + minute * LEVELS[0], points)
    with database.reading() as connection:
        query = sa.select(
            table.c.level, sa.func.sum(sa.func.length(table.c.data) + sa.func.length(table.c.scope) + 40)
        ).group_by(table.c.level)  # fmt: skip
        levels = {level: int(size) for level, size in connection.execute(query)}
    database.close()
    return sum(levels.values()), levels


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        took = cpu(options.ranks, options.samples, Path(folder))
        print(
            f"a sample of {options.ranks} ranks: {took * 1e3:.2f} ms of CPU, {took:.2%} of a core"
        )
        total, levels = growth(options.ranks, Path(folder))
        kept = ", ".join(f"{size / 1e3:.0f} kB at {level} s" for level, size in levels.items())
        print(f"a day of a task of {options.ranks} ranks adds {total / 1e3:.0f} kB: {kept}")


if __name__ == "__main__":
    main()
