"""The tests' own machinery: draws, budgets, ports, and the guard that ends what a run started."""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from tests import draws, ports
from tests.plugins import costs

ROOT = Path(__file__).parents[1]
SERVICE = """
import subprocess, sys
from tests.plugins import guard
guard.start()
service = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(service.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_services_die_with_the_run_that_started_them(number: signal.Signals) -> None:
    environment = {name: os.environ[name] for name in os.environ if name != "FIREFLYER_TEST_RUN"}
    run = subprocess.Popen(
        [sys.executable, "-c", SERVICE],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert run.stdout is not None
    service = os.pidfd_open(int(run.stdout.readline()))
    run.send_signal(number)
    assert select.select([service], [], [], 60)[0], "the service outlives its run"
    os.close(service)
    run.communicate()


def test_a_tenth_is_drawn_and_a_seed_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(draws.FULL, "0")
    assert (draws.cases(400), draws.cases(3)) == (40, 1)
    few = draws.seeds("a name", 400)
    assert few == draws.seeds("a name", 400)
    assert len(set(few)) == 40
    assert few != draws.seeds("another", 400)
    some = [*draws.points("a name", 100)]
    assert 5 <= len(some) <= 100
    assert some == sorted(set(some))
    monkeypatch.setenv(draws.FULL, "1")
    assert len(draws.seeds("a name", 400)) == 400
    assert [*draws.points("a name", 100)] == [*range(1, 101)]


def test_loaded_modules_change_nothing_that_hypothesis_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    @seed(1)
    @settings(max_examples=100, database=None)
    @given(st.integers())
    def draw(number: int) -> None:
        drawn.append(number)

    draw()
    (tmp_path / "constants.py").write_text(f"NUMBERS = {[*range(60_000, 60_100)]}")
    monkeypatch.syspath_prepend(tmp_path)
    before = drawn[:]
    drawn.clear()
    importlib.import_module("constants")
    draw()
    monkeypatch.delitem(sys.modules, "constants")
    assert drawn == before


def test_a_port_is_taken_once() -> None:
    found = ports.take_ports(20)
    assert len(set(found)) == 20
    assert set(ports.take_ports(20)).isdisjoint(found)


def test_a_part_over_its_budget_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, budget = tmp_path / "costs.json", tmp_path / "budget.toml"
    monkeypatch.setattr(costs, "RECORD", record)
    monkeypatch.setattr(costs, "BUDGET", budget)
    assert costs.recorded_over_budget() == []
    budget.write_text("yardstick_s = 0.05\n[quick]\nkv = 40\nfs3 = 30\n[full]\n")
    parts = {"kv": 70.0, "fs3": 40.0}
    record.write_text(json.dumps({"quick": {"yardstick_s": 0.05, "parts": parts}}))
    (found,) = costs.recorded_over_budget()
    assert found.startswith("kv costs 70 CPU seconds in the quick tests, its budget is 40")
    record.write_text(json.dumps({"quick": {"yardstick_s": 0.1, "parts": parts}}))
    assert costs.recorded_over_budget() == [], "on a machine of half the speed"


def test_tests_count_to_the_folder_of_their_part() -> None:
    assert costs.part_of("tests/fs3/client/test_files.py::test_a[b/c]") == "fs3"
    assert costs.part_of("tests/test_tiers.py::test_a") == "root"
    assert costs.part_of("services") == "services"


CONFTEST = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.plugins import costs
costs.RECORD, costs.BUDGET = Path("costs.json"), Path("budget.toml")
pytest_plugins = ["tests.plugins.costs"]
def pytest_addoption(parser):
    parser.addoption("--full", action="store_true")
"""


@pytest.mark.parametrize(
    ("options", "over"),
    [(["-n", "2"], True), (["-x"], False), (["--deselect", "tests/other"], False)],
)
def test_a_whole_run_names_what_is_over_budget(
    tmp_path: Path, options: list[str], over: bool
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (tmp_path / "budget.toml").write_text("yardstick_s = 10\n[quick]\ncollection = 100\n")
    kv = tmp_path / "tests" / "kv"
    kv.mkdir(parents=True)
    (kv / "test_it.py").write_text(
        "import time\n"
        "def test_it():\n"
        "    end = time.thread_time() + 1.2\n"
        "    while time.thread_time() < end: pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "xdist", *options]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout
    assert ("kv costs" in done.stdout) == over
    assert (tmp_path / "costs.json").exists() == over
