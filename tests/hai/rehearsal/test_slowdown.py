"""Whoever is killed, no process stays stopped."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest


class Target:
    """A process that sleeps, and its pidfd."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "1000"])
        self.pidfd = os.pidfd_open(self.process.pid)

    def state(self) -> str:
        with open(f"/proc/{self.process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]

    def wait_stopped(self) -> None:
        os.waitid(os.P_PIDFD, self.pidfd, os.WSTOPPED | os.WNOWAIT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.pidfd)


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.close()


def start(
    target: Target, stopped_ms: float = 1e6, seconds: float = 1000.0
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "fireflyer.hai.rehearsal.slowdown"]
    command += [str(stopped_ms), "1", str(seconds), str(target.pidfd)]
    helper = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[target.pidfd],
        start_new_session=True,
    )  # fmt: skip
    assert helper.stdout is not None
    assert helper.stdout.readline() == b"slowing\n"
    return helper


def watchdog_of(helper: subprocess.Popen[bytes]) -> int:
    with open(f"/proc/{helper.pid}/task/{helper.pid}/children") as file:
        return int(file.read())


def ended(pid: int) -> None:
    """Waits for the end of a process that is not ours."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([pidfd], [], [])
    os.close(pidfd)


@pytest.mark.parametrize("who", ["helper", "watchdog", "starter", "time", "asked"])
def test_nothing_is_left_stopped(target: Target, who: str) -> None:
    helper = start(target, seconds=0.001 if who == "time" else 1000.0)
    assert helper.stdin is not None
    watchdog = None
    if who != "time":
        target.wait_stopped()
        assert target.state() == "T"
        watchdog = watchdog_of(helper)
    match who:
        case "helper":
            helper.kill()
        case "watchdog":
            assert watchdog is not None
            os.kill(watchdog, signal.SIGKILL)
        case "starter":
            helper.stdin.close()
        case "asked":
            helper.terminate()
    helper.wait()
    if watchdog is not None:
        ended(watchdog)
    assert target.state() != "T"
    assert target.process.poll() is None
    for pipe in (helper.stdin, helper.stdout):
        assert pipe is not None
        pipe.close()


def test_it_stops_again_and_again(target: Target) -> None:
    helper = start(target, stopped_ms=1.0)
    for _ in range(5):
        os.waitid(os.P_PIDFD, target.pidfd, os.WSTOPPED)
        os.waitid(os.P_PIDFD, target.pidfd, os.WCONTINUED)
    helper.communicate()
    assert target.state() != "T"


def test_a_target_that_ends_ends_it(target: Target) -> None:
    helper = start(target)
    target.wait_stopped()
    target.process.kill()
    assert helper.wait() == 0
    helper.communicate()
