"""Draw the random cases of tests: how many, and from which seed.

`make test` runs a tenth of the cases, from one fixed seed, so that a change is judged by what it changes.
`make test-all` runs all of them; its seed comes from the commit, so each commit tries other cases and a run
can be repeated. `SEED=...` chooses another one. A case that fails becomes a test of its own.
"""

import functools
import os
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

from hypothesis.internal.conjecture import providers

FIXED = 20261127

FULL = "FIREFLYER_TEST_FULL"
"""Set to 1 in the environment by `pytest --full`, for workers and sub-processes."""


def full() -> bool:
    return os.environ.get(FULL) == "1"


@functools.cache
def seed() -> int:
    """Returns `$SEED`, or `FIXED`; with `--full` a number from the commit's hash (no repository: 0)."""
    if given := os.environ.get("SEED"):
        return int(given)
    if not full():
        return FIXED
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    root = Path(__file__).parents[1]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(done.stdout, 16)


def draw_no_constants() -> None:
    """Keeps Hypothesis from drawing constants of modules that a process has loaded.

    Which tests a process has run before decides which modules are loaded, so the same seed would draw other
    examples in each run.
    """
    providers._get_local_constants = lambda: providers._local_constants


def cases(count: int) -> int:
    """`count` with `--full`, else a tenth of it, at least 1."""
    return count if full() else max(1, count // 10)


def drawn(name: str) -> Random:
    """Random numbers that depend on the seed and the name alone."""
    return Random(zlib.crc32(name.encode()) ^ seed())


def seeds(name: str, count: int) -> list[int]:
    """`cases(count)` different seeds, for tests that are parametrized by one."""
    return drawn(name).sample(range(1 << 31), cases(count))


def points(name: str, most: int) -> Iterator[int]:
    """1, 2, 3, ..., `most` with `--full`, else about a tenth of them: where a process is to be killed."""
    chance, point = drawn(name), 0
    while (point := point + (1 if full() else chance.randint(1, 19))) <= most:
        yield point
