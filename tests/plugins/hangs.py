"""Give each test and the whole run a deadline, which holds in native code, too.

A test past its deadline ends its process (see watchdog.py); with workers, the others go on and a new worker
takes its place. Failures are named at once, because a run that is killed shows no summary.
"""

import contextlib
import os
import signal
import subprocess
import sys
import types
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.plugins import guard

DEADLINE_S = 120.0
RUN_LIMIT_S = 75 * 60.0
ENDING_S = 60.0
"""For the end of a session, beyond its tests."""

DEADLINE = "FIREFLYER_TEST_DEADLINE_S"
"""The deadline of a test in seconds, in the environment of workers and of what tests start."""


class _Deadlines:
    """Tells a watchdog when each test of this process begins and ends."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name("watchdog.py"))]
        read, self._told = os.pipe()
        self._process = subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=read,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read)
        self._owner = os.getpid()

    def _tell(self, limit_s: float, name: str = "") -> None:
        if os.getpid() == self._owner:  # a forked child has no deadline of its own
            with contextlib.suppress(BrokenPipeError):
                os.write(self._told, f"{limit_s:g} {name}\n".encode())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        mark = item.get_closest_marker("deadline")
        limit_s = mark.args[0] if mark else 0.0
        self._tell(max(limit_s, item.config.option.deadline), item.nodeid)
        try:
            return (yield)
        finally:
            self._tell(0)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, Any, Any]:
        self._tell(ENDING_S, "the end of the session")
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        os.close(self._told)
        self._process.wait()


class _Names:
    """Names tests that fail when they fail, and those that run when the whole run is past its limit."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._running: dict[str, None] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal:
            terminal.ensure_newline()
            terminal.write_line(f"{report.nodeid}: failed in {report.when}", red=True)

    def pytest_sessionstart(self) -> None:
        limit_s = self._config.option.run_limit
        if limit_s and not self._config.option.usepdb:
            signal.signal(signal.SIGALRM, self._end_run)
            signal.setitimer(signal.ITIMER_REAL, limit_s)

    def pytest_unconfigure(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _end_run(self, _number: int, _frame: types.FrameType | None) -> None:
        print(
            "\nthe run is past its limit; these tests run:", *self._running, sep="\n  ", flush=True
        )
        guard.end_marked(os.environ[guard.VARIABLE], but=os.getpid())
        os._exit(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fireflyer")
    group.addoption(
        "--deadline",
        type=float,
        default=float(os.environ.get(DEADLINE, DEADLINE_S)),
        metavar="SECONDS",
        help=f"wall time that a test may take, if it has no mark for more (default: {DEADLINE_S:g})",
    )
    group.addoption(
        "--run-limit",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wall time that the whole run may take (default: any)",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ[DEADLINE] = f"{config.option.deadline:g}"
    worker = hasattr(config, "workerinput")
    if not worker:
        config.pluginmanager.register(_Names(config))
    if worker or not (config.option.usepdb or getattr(config.option, "numprocesses", None)):
        config.pluginmanager.register(_Deadlines())
