"""Measure CPU and wall seconds of each test; hold the parts to their budgets.

A test's CPU seconds are its process's and those of its children that were waited for. A service that several
tests use counts to the test that starts it and, at the end of all, to "services"; one that is watched, to the
test at hand.
"""

import contextlib
import json
import os
import resource
import statistics
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUDGET = ROOT / "tests" / "budget.toml"
RECORD = ROOT / "build" / "costs.json"
SHOWN = 40
YARDSTICK = 1_000_000
"""Additions that are timed, so that budgets hold on slower machines."""
EVERY = 200
"""Tests of a process between two measurements of the yardstick."""

Cost = tuple[str, float, float]
"""A test's name, CPU seconds, wall seconds."""


_watched: list[int] = []


def watch(pid: int) -> None:
    """From now on what this child and its own children use counts to the test at hand."""
    _watched.append(pid)


def cpu_s() -> float:
    """CPU seconds of this process, its children that were waited for, and the watched ones."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ticks = 0
    for pid in _watched:
        with contextlib.suppress(OSError):  # one that has ended counts among the children
            ticks += sum(
                map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])
            )
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + ticks / os.sysconf(
        "SC_CLK_TCK"
    )


def yardstick_s() -> float:
    """CPU seconds of a fixed piece of work, measured beside what runs now.

    Two threads of one core slow each other down, so what tests cost is compared with what the yardstick takes
    between them, not when the machine is quiet again.
    """
    began = time.thread_time()
    total = 0
    for number in range(YARDSTICK):
        total += number
    return time.thread_time() - began


def part_of(name: str) -> str:
    """The part whose budget a test counts to: the folder below tests/, or "collection" and "services"."""
    if "::" not in name:
        return name
    folders = name.partition("::")[0].split("/")
    return folders[1] if len(folders) > 2 else "root"


def by_part(costs: list[Cost]) -> dict[str, float]:
    """CPU seconds of each part."""
    parts: dict[str, float] = defaultdict(float)
    for name, cpu, _ in costs:
        parts[part_of(name)] += cpu
    return dict(sorted(parts.items()))


class Recorder:
    """Runs where tests run: in pytest itself, or in each worker, which tells the costs at its end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.costs: list[Cost] = []
        self.yardsticks: list[float] = []
        self._began = cpu_s(), time.monotonic()
        self._ending = 0.0, 0.0

    def pytest_collection_finish(self) -> None:
        cpu, wall = self._began
        self.costs.append(("collection", cpu_s() - cpu, time.monotonic() - wall))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if len(self.costs) >= EVERY * len(self.yardsticks):
            self.yardsticks.append(yardstick_s())
        cpu, wall = cpu_s(), time.monotonic()
        try:
            return (yield)
        finally:
            name, (ended_cpu, ended_wall) = item.nodeid.partition("@")[0], self._ending
            cpu, wall = cpu_s() - cpu - ended_cpu, time.monotonic() - wall - ended_wall
            self.costs.append((name, cpu, wall))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        cpu, wall = cpu_s(), time.monotonic()
        try:
            return (yield)
        finally:
            if nextitem is None:
                self._ending = cpu_s() - cpu, time.monotonic() - wall
                self.costs.append(("services", *self._ending))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["costs"] = self.costs
            self._config.workeroutput["yardsticks"] = self.yardsticks


class Report:
    """Runs once: adds up, keeps the record of a whole run, and shows what costs most."""

    def __init__(self, config: pytest.Config, recorder: Recorder) -> None:
        self._config = config
        self._costs = recorder.costs
        self._yardsticks = recorder.yardsticks
        self._over: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        told = getattr(node, "workeroutput", {})
        self._costs += map(tuple, told.get("costs", []))
        self._yardsticks += told.get("yardsticks", [])

    def _whole(self) -> bool:
        """Whether all tests of the tier were asked for."""
        option = self._config.option
        cached = ("lf", "stepwise")  # there are none without the cache
        fewer = (
            "keyword",
            "markexpr",
            "collectonly",
            "deselect",
            "ignore",
            "ignore_glob",
            "maxfail",
        )
        if any(getattr(option, name, None) for name in (*fewer, *cached)):
            return False
        return self._config.args_source is not pytest.Config.ArgsSource.ARGS

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        tier = "full" if self._config.option.full else "quick"
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and self._whole():
            record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
            yardstick = statistics.median(self._yardsticks or [yardstick_s()])
            record[tier] = {"yardstick_s": yardstick, "parts": by_part(self._costs)}
            RECORD.parent.mkdir(exist_ok=True)
            RECORD.write_text(json.dumps(record, indent=1))
            self._over = over_budget(tier, record[tier])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._config.option.costs:
            self._show(terminalreporter)
        if self._over:
            terminalreporter.section("over budget: `make budgets` fails")
            for line in self._over:
                terminalreporter.write_line(line, red=True)

    def _show(self, to: pytest.TerminalReporter) -> None:
        to.section("CPU seconds")
        for part, cpu in sorted(by_part(self._costs).items(), key=lambda each: -each[1]):
            to.write_line(f"{cpu:8.1f}  {part}")
        to.write_line(f"{sum(cpu for _, cpu, _ in self._costs):8.1f}  in all")
        if self._yardsticks:
            to.write_line(f"{statistics.median(self._yardsticks):8.4f}  the yardstick, beside them")
        to.section(f"the {SHOWN} most expensive tests: CPU seconds, wall seconds")
        for name, cpu, wall in sorted(self._costs, key=lambda cost: -cost[1])[:SHOWN]:
            to.write_line(f"{cpu:8.2f} {wall:8.2f}  {name}")


def over_budget(tier: str, run: dict[str, Any]) -> list[str]:
    """Parts of a recorded run that cost more than 1.5 times their budget, a line each.

    They fail `make budgets`, never a run or lint: a slow machine is no fault of a change. One on which the
    yardstick takes longer is allowed more in proportion; a second is for noise.
    """
    budget = tomllib.loads(BUDGET.read_text())
    slower = max(1.0, run["yardstick_s"] / budget["yardstick_s"])
    found = []
    for part, cpu in run["parts"].items():
        allowed = budget[tier].get(part, 0.0)
        if cpu > 1.5 * slower * allowed + 1:
            found.append(
                f"{part} costs {cpu / slower:.0f} CPU seconds in the {tier} tests, its budget is "
                f"{allowed:g}: make its tests cheaper, or argue for more in tests/budget.toml"
            )
    return found


def recorded_over_budget() -> list[str]:
    """The same of the last whole run of each tier."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return [line for tier, run in record.items() for line in over_budget(tier, run)]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fireflyer")
    group.addoption("--costs", action="store_true", help=f"show the {SHOWN} most expensive tests")


def pytest_configure(config: pytest.Config) -> None:
    recorder = Recorder(config)
    config.pluginmanager.register(recorder)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config, recorder))
