"""The gate judges planted tests: which fail the run, which are named, and what is ended."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S, until

ROOT = Path(__file__).parents[2]
CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from tests.plugins import guard
pytest_plugins = ["tests.plugins.hangs", "tests.plugins.second_look", "tests.plugins.workers"]
def pytest_configure():
    guard.start()
"""


def run(folder: Path, script: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Runs a script of tests with the options of `make test`, two workers and the plug-ins of the gate."""
    (folder / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  deadline\n  xdist_group\naddopts = -p xdist\n"
    )
    (folder / "test_it.py").write_text(script)
    makefile = (ROOT / "Makefile").read_text()
    (fixed,) = re.findall(r"^TESTS = \$\(PY\) (.*)$", makefile, re.MULTILINE)
    command = [sys.executable, *fixed.split(), "-n", "2", *options, "test_it.py"]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FIREFLYER_TEST")
    }
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )


def until_ended(pid: str) -> None:
    """Waits for the guard, which ends processes after pytest."""
    command = Path("/proc", pid, "cmdline")
    until(lambda: not command.exists() or not command.read_text())  # empty: not reaped yet


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_bad():\n    assert 1 == 2\ndef test_good():\n    pass\n")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "FAILED test_it.py::test_bad - assert 1 == 2" in done.stdout
    assert "flaky:" not in done.stdout
    assert "1 failed, 1 passed" in done.stdout.splitlines()[-1]


RACE = """
import os, pytest
@pytest.mark.parametrize("name", ["a", "b@c", "d::e"])
def test_race(name):
    try:
        open("mark-" + name.replace(":", ""), "x")
    except FileExistsError:
        return
    print("said before it failed")
    raise AssertionError("the first\\nof two lines")
"""


def test_a_test_that_fails_once_is_named_and_the_run_passes(tmp_path: Path) -> None:
    done = run(tmp_path, RACE)
    assert done.returncode == 0, done.stdout
    for name in ("a", "b@c", "d::e"):
        line = f"flaky: test_it.py::test_race[{name}] (first: AssertionError: the first)"
        assert line in done.stdout.splitlines()
    assert "3 flaky" in done.stdout.splitlines()[-1]
    assert done.stdout.count("\nsaid before it failed\n") == 3, "what a test printed is shown"


SETUP = """
import pytest
@pytest.fixture
def service():
    try:
        open("mark", "x").close()
    except FileExistsError:
        return
    raise OSError("the service did not start")
def test_it(service):
    pass
"""


def test_a_setup_that_fails_once_is_looked_at_too(tmp_path: Path) -> None:
    done = run(tmp_path, SETUP)
    assert done.returncode == 0, done.stdout
    assert "flaky: test_it.py::test_it (first: OSError: the service did not start)" in done.stdout


def test_a_file_that_cannot_be_collected_fails_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "import nowhere_to_be_found\n").returncode != 0


HANG = """
import ctypes, os, pytest, subprocess
def test_hang():
    child = subprocess.Popen(["/bin/sleep", "1000"], env={})  # without the mark that guard.py seeks
    open("child", "w").write(str(child.pid))
    if os.fork() == 0:
        name_of_a_child()
    name_of_a_parent()
def name_of_a_child():
    while True:
        os.read(os.pipe()[0], 1)
def name_of_a_parent():
    ctypes.PyDLL(None).pause()  # in native code, with the interpreter's lock
@pytest.mark.parametrize("number", range(20))
def test_good(number):
    pass
"""


def test_a_test_that_hangs_ends_by_its_deadline_with_the_stacks_of_its_processes(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, HANG, "--deadline=2")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "test_it.py::test_hang is past its deadline" in done.stderr
    assert "in name_of_a_parent" in done.stderr
    assert "in name_of_a_child" in done.stderr
    assert "FAILED test_it.py::test_hang" in done.stdout
    assert "1 failed, 20 passed" in done.stdout
    until_ended((tmp_path / "child").read_text())


DETACHES_AND_HANGS = """
import subprocess, time
def test_it():
    subprocess.run(["sh", "-c", "setsid sleep 1000 & echo $! > child"], check=True)
    time.sleep(1000)
"""


def test_a_hanging_run_without_workers_leaves_no_detached_process(tmp_path: Path) -> None:
    run(tmp_path, DETACHES_AND_HANGS, "--deadline=2", "-n", "0")
    until_ended((tmp_path / "child").read_text().strip())


DEATHS = """
import os, pytest
@pytest.mark.parametrize("number", range(40))
def test_it(number):
    if number in (7, 17):
        os._exit(3)
@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(10))
def test_group(number):
    if number == 4:
        os._exit(3)
"""


def test_tests_that_kill_their_workers_fail_and_the_rest_runs(tmp_path: Path) -> None:
    done = run(tmp_path, DEATHS)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    failed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert failed == {
        "test_it.py::test_it[7]",
        "test_it.py::test_it[17]",
        "test_it.py::test_group[4]@one",
    }
    assert "3 failed, 47 passed" in done.stdout


CHILD = """
import subprocess
def test_it():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open("child", "w").write(str(child.pid))
    child.returncode = 0
"""


def test_a_load_group_stays_on_one_worker(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "import pytest\n"
        "@pytest.mark.parametrize('number', range(40))\n"
        "@pytest.mark.xdist_group('a service')\n"
        "def test_it(number, worker_id):\n"
        "    with open('workers', 'a') as file:\n"
        "        file.write(worker_id + chr(10))\n",
    )
    assert done.returncode == 0, done.stdout
    assert len(set((tmp_path / "workers").read_text().split())) == 1


def test_a_child_that_a_test_leaves_is_ended(tmp_path: Path) -> None:
    assert run(tmp_path, CHILD).returncode == 0
    until_ended((tmp_path / "child").read_text())


LONG = """
import pytest, signal
@pytest.hookimpl(trylast=True)
def pytest_runtest_logstart(nodeid):  # pytest itself knows now that the test runs: its limit passes
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if left_s:
        assert 900 < left_s <= 1000
        signal.setitimer(signal.ITIMER_REAL, 0.01)
"""


def test_a_run_past_its_limit_names_what_runs_and_ends_it(tmp_path: Path) -> None:
    (tmp_path / "limit.py").write_text(LONG)
    hang = "import time\ndef test_long():\n    time.sleep(1000)\n"
    done = run(tmp_path, hang, "--run-limit=1000", "-p", "limit")
    assert done.returncode == 1
    assert "the run is past its limit; these tests run:\n  test_it.py::test_long" in done.stdout
