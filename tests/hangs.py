"""End a process of pytest that hangs where pytest-timeout cannot help, with the stacks of its threads.

pytest-timeout interrupts Python code only, and no longer once a test has failed: a teardown that waits in
native code, or after a failure, would keep the whole run waiting. Failures are named at once, because a run
that is killed shows no summary.
"""

import ctypes
import signal
import struct
from collections.abc import Generator
from typing import Any

import pytest

GRACE_S = 120.0
"""For the end of a test or of the session, and beyond a test's own limit."""


class _Alarm:
    """SIGABRT in a while, upon which pytest's faulthandler shows the stacks. No thread; forks have none."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = struct.pack("@Pii48x", 0, signal.SIGABRT, 0)  # struct sigevent: SIGEV_SIGNAL
        self._libc.timer_create(1, event, ctypes.byref(self._timer))  # CLOCK_MONOTONIC

    def set(self, after_s: float) -> None:
        """Instead of what was set before; 0: never."""
        spec = struct.pack("@llll", 0, 0, int(after_s), int(after_s % 1 * 1e9))
        self._libc.timer_settime(self._timer, 0, spec, None)


class _Limits:
    def __init__(self) -> None:
        self._alarm = _Alarm()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        mark = item.get_closest_marker("timeout")
        limit_s = mark.args[0] if mark and mark.args else item.config.getini("timeout")
        self._alarm.set(float(limit_s) + GRACE_S)
        try:
            return (yield)
        finally:
            self._alarm.set(0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        self._alarm.set(2 * GRACE_S)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, Any, Any]:
        self._alarm.set(GRACE_S)
        try:
            return (yield)
        finally:
            self._alarm.set(0)


class _Names:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal:
            terminal.ensure_newline()
            terminal.write_line(f"{report.nodeid}: failed in {report.when}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    worker = hasattr(config, "workerinput")
    config.pluginmanager.register(_Limits() if worker else _Names(config))
