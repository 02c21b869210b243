"""Run each test that failed once more (`--second-look`), alone in a process of its own, after all others.

A test that passes then is named as flaky and does not fail the run; `tests/flaky.toml` says what becomes of
it. A change that fails many tests gets no second look: that is no race.
"""

import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest

MOST = 20
"""More failed tests than this are not run again."""


class _SecondLook:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, list[pytest.TestReport]] = {}
        self._flaky: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int
    ) -> Generator[None, Any, Any]:
        result = yield  # the workers have ended
        if exitstatus == pytest.ExitCode.TESTS_FAILED and len(self._failed) <= MOST:
            terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
            for name in self._failed:
                terminal.ensure_newline()
                terminal.write_line(f"a second look, alone: {name}")
                if self._passes_alone(name):
                    self._forgive(name, terminal)
            if not {"failed", "error"} & terminal.stats.keys():
                session.exitstatus = pytest.ExitCode.OK
        return result

    def _passes_alone(self, name: str) -> bool:
        command = [sys.executable, "-m", "pytest", "-q", _without_group(name)]
        command += [f"--deadline={self._config.option.deadline}"]
        if getattr(self._config.option, "full", False):
            command.append("--full")
        return subprocess.run(command, cwd=self._config.rootpath, check=False).returncode == 0

    def _forgive(self, name: str, terminal: Any) -> None:
        """Moves the reports of a test from those that fail the run to those of flaky tests."""
        reports = self._failed[name]
        for kind in ("failed", "error"):
            left = [each for each in terminal.stats.pop(kind, []) if each not in reports]
            if left:
                terminal.stats[kind] = left
        terminal.stats.setdefault("flaky", []).extend(reports)
        self._flaky.append(f"flaky: {name} (first: {_assertion(reports[0])})")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for report in terminalreporter.stats.get("flaky", []):
            terminalreporter.section(f"first look: {report.nodeid}")
            report.toterminal(terminalreporter._tw)
            for head, text in report.sections:
                terminalreporter.write_sep("-", head)
                terminalreporter.write_line(text)
        for line in self._flaky:
            terminalreporter.write_line(line, yellow=True)


def _without_group(name: str) -> str:
    """Returns a test's name without the load group that pytest-xdist puts behind it."""
    at = name.rfind("@")
    return name[:at] if at > name.rfind("]") and "::" in name[:at] else name


def _assertion(report: pytest.TestReport) -> str:
    """Returns one line that says why a test failed."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else report.longreprtext.strip()).partition("\n")[0][:300]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fireflyer")
    group.addoption("--second-look", action="store_true", help="run failed tests again, alone")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.second_look and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_SecondLook(config))
