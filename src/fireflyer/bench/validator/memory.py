"""Memory bandwidth of the validator's check against a C triad."""

import os
import subprocess
from functools import partial
from pathlib import Path

from fireflyer.bench.harness.interleaving import interleaved
from fireflyer.bench.harness.report import Row
from fireflyer.bench.peers.compiling import compiled
from fireflyer.errors import FireflyerError
from fireflyer.validator.checks import memory

SOURCE = Path(__file__).parents[1] / "peers" / "triad.cpp"
FLAGS = ("-std=c++20", "-O3", "-pthread")

PASSES = memory.ROUNDS
"""Number of passes over the arrays per measurement; the value is the best pass, as in STREAM."""


def run(rounds: int, array_bytes: int = memory.ARRAY_BYTES) -> list[Row]:
    """Measures each NUMA node with both programs, in turn.

    Args:
        array_bytes: size of each of the three arrays of a thread.

    Raises:
        ConfigError: there is no C++ compiler.
        FireflyerError: the triad failed.
    """
    program = compiled(SOURCE, FLAGS)
    rows = []
    for node, cpus in memory.numa_nodes(Path("/sys"), os.sched_getaffinity(0)).items():
        asked = (cpus, array_bytes)
        found = interleaved(
            {"ours": partial(_ours, *asked), "triad": partial(_triad, program, *asked)}, rounds
        )
        case = f"memory bandwidth, {node}, {len(cpus)} threads"
        rows.append(Row.of_speeds(case, "GB/s", found["ours"], "C triad", found["triad"],
                                  goal=0.95, aim=1.0))  # fmt: skip
    return rows


def _ours(cpus: set[int], array_bytes: int) -> float:
    return max(memory.bandwidth(cpus, PASSES, array_bytes))


def _triad(program: Path, cpus: set[int], array_bytes: int) -> float:
    command = [str(program), str(array_bytes), str(PASSES), *map(str, sorted(cpus))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FireflyerError(f"the C triad ended with exit code {done.returncode}: {done.stderr}")
    return max(float(line) for line in done.stdout.split())
