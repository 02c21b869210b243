"""What the dataset tests share: record files whose samples tell their number, children that die."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import die_at_call, fork_child

from fireflyer.ffrecord import FileWriter

Records = Callable[..., list[Path]]
DieAt = Callable[[int], None]
Forked = Callable[[Callable[[], None]], int]


def content(number: int) -> bytes:
    """Sample `number`: eight bytes that say so, then 0 to 40 more."""
    return number.to_bytes(8, "little") + bytes([number % 251]) * (number * 7 % 41)


def number_of(sample: "np.ndarray[Any, Any]") -> int:
    """Which sample this is, checked to be whole."""
    number = int.from_bytes(sample[:8].tobytes(), "little")
    assert sample.tobytes() == content(number)
    return number


@pytest.fixture(name="content", scope="session")
def content_fixture() -> Callable[[int], bytes]:
    return content


@pytest.fixture(name="number_of", scope="session")
def number_of_fixture() -> Callable[[Any], int]:
    return number_of


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """(n, files=3, folder="records") -> paths of record files with samples 0 to n - 1."""

    def write(n: int, files: int = 3, folder: str = "records") -> list[Path]:
        directory = tmp_path / folder
        directory.mkdir(exist_ok=True)
        bounds = [n * part // files for part in range(files + 1)]
        paths = []
        for part in range(files):
            path = directory / f"PART_{part:05d}.ffr"
            with FileWriter(path, bounds[part + 1] - bounds[part]) as writer:
                for number in range(bounds[part], bounds[part + 1]):
                    writer.write_one(content(number))
            paths.append(path)
        return paths

    return write


@pytest.fixture
def forked() -> Forked:
    """Runs a body in a forked child; returns its exit code, -n if signal n ended it."""

    def run(body: Callable[[], None]) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(fork_child(body), 0)[1])

    return run


CALLS = (
    *("open", "close", "write", "pwrite", "fsync", "link", "unlink"),
    *("replace", "mkdir", "rmdir", "listdir", "utime"),
)


@pytest.fixture(scope="session")
def die_at() -> DieAt:
    """For forked children only."""
    return lambda call: die_at_call(CALLS, call)
