"""`make mutants`: what it refuses, which lines it changes, and a copy like the checkout."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
COUNTER = "def above(count: int) -> bool:\n    return count > 1\n"
TEST = "from counter import above\n\ndef test_it():\n    assert above(2) and not above({low})\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A part of one line, and a copy of it in which nothing needs to be built."""
    part, tests = tmp_path / "src" / "fireflyer" / "kv", tmp_path / "tests" / "kv"
    part.mkdir(parents=True)
    tests.mkdir(parents=True)
    (tmp_path / "native").mkdir()
    (tmp_path / "conftest.py").write_text("import sys; sys.path.insert(0, 'src/fireflyer/kv')\n")
    (part / "counter.py").write_text(COUNTER)
    (tests / "test_counter.py").write_text(TEST.format(low=1))
    built = tmp_path / "build" / "line-mutants" / "native-build"
    built.mkdir(parents=True)
    (built / "build.ninja").write_text("rule none\n  command = true\nbuild _native: none\n")
    (tmp_path / ".gitignore").write_text("build\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def mutants(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "scripts" / "mutants.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def test_a_part_that_there_is_not() -> None:
    done = mutants("nowhere")
    assert done.returncode == 2
    assert "no part 'nowhere': there are bench, checkpoint," in done.stderr


@pytest.mark.full
def test_all_mutants_are_caught_or_listed(checkout: Path) -> None:
    done = mutants("kv", "--tree", str(checkout))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 mutants caught (there are no 12)" in done.stdout
    (checkout / "tests" / "kv" / "test_counter.py").write_text(TEST.format(low=0))
    done = mutants("kv", "--tree", str(checkout))
    assert done.returncode == 1
    survivors = done.stdout.partition("survivors:\n")[2].splitlines()
    assert len(survivors) == 1
    assert "return count > 1  ->  return count > 2" not in survivors[0]


@pytest.mark.full
def test_tests_that_fail_without_a_mutant_catch_none(checkout: Path) -> None:
    (checkout / "tests" / "kv" / "test_counter.py").write_text(TEST.format(low=2))
    done = mutants("kv", "--tree", str(checkout))
    assert done.returncode == 1
    assert "does not pass without a mutant: tests/kv/test_counter.py::test_it" in done.stderr


@pytest.mark.full
def test_one_run_at_a_time_in_a_copy_without_what_was_removed(checkout: Path) -> None:
    copy = checkout / "build" / "line-mutants"
    (copy / "tests" / "kv").mkdir(parents=True)
    (copy / "tests" / "kv" / "test_removed.py").write_text("def test_it():\n    assert False\n")
    with (copy / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another run uses" in mutants("kv", "--tree", str(checkout)).stderr
    assert mutants("kv", "--tree", str(checkout), "--count", "1").returncode == 0
