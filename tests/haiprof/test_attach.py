"""Attaching to real processes: dormant, attached, left as they were, never harmed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.draws import cases
from tests.haiprof.endurance import endure
from tests.haiprof.scripts import (
    IDLE,
    PREPARE,
    TRAINS,
    descriptors,
    is_prepared,
    running,
    threads,
    timers,
)
from tests.waiting import until

from fireflyer.errors import ProfileError
from fireflyer.haiprof.attach.collect import Options, collect, read_profile
from fireflyer.haiprof.attach.session import Session
from fireflyer.haiprof.attach.target import NotPrepared, Target
from fireflyer.haiprof.inside.prepare import ENDING
from fireflyer.haiprof.messages import Request, meeting_folder, socket_path


def attach(pid: int, seconds: float = 0.2, rate_hz: float = 100.0) -> Session:
    return collect([pid], Options(seconds=seconds, rate_hz=rate_hz))[0].session


def test_a_dormant_process_has_no_thread_file_or_timer_and_is_left_as_it_was(
    tmp_path: Path,
) -> None:
    with running(IDLE) as script:
        until(lambda: descriptors(script.pid) == ["0", "1", "2"])  # the start has read its files
        state = (threads(script.pid), descriptors(script.pid), timers(script.pid))
        assert state[0] == 1
        assert len(state[1]) == 3
        assert state[2] == ""
        for _ in range(2):
            found = collect([script.pid], Options(seconds=0.3), tmp_path)[0]
            assert not found.session.failure
            until(lambda: threads(script.pid) == 1)
            assert (threads(script.pid), descriptors(script.pid), timers(script.pid)) == state
        (stored,) = read_profile(tmp_path)
        functions = [[f.function for f in s.frames] for s in stored.stacks.values()]
        assert any("inner" in names and "outer" in names for names in functions)
        assert {s.thread for s in stored.stack_samples} == {"MainThread"}
        assert stored.header.missing["phase"] == "the process has not imported torch"
        assert set(stored.samples) >= {"basic", "cpu", "io"}
        assert script.poll() is None


def test_steps_of_a_training_process_and_its_operators(tmp_path: Path) -> None:
    with running(PREPARE + TRAINS) as script:
        asked = Options(seconds=60, most_steps=20, trace_steps=2, from_first_step=True)
        (found,) = collect([script.pid], asked, tmp_path)
        until(lambda: not is_attached(script.pid))
        assert script.poll() is None
    rows = found.profile.steps
    assert len(rows) >= 20
    assert all(row.phases[name] > 0 for row in rows for name in ("forward", "backward", "data"))
    assert all(sum(row.phases.values()) == pytest.approx(row.seconds) for row in rows)
    assert {o.name for o in found.profile.operators} >= {"aten::linear", "aten::addmm"}
    inside = rows[0].begin_ns, rows[-1].begin_ns + round(rows[-1].seconds * 1e9)
    assert any(inside[0] < o.begin_ns < inside[1] for o in found.profile.operators)
    assert {span.phase for span in found.profile.spans} >= {"data", "forward", "optimizer"}
    assert len(read_profile(tmp_path)[0].steps) == len(rows)


def is_attached(pid: int) -> bool:
    return any(os.readlink(f"/proc/{pid}/fd/{n}").startswith("socket") for n in descriptors(pid))


def test_the_process_survives_the_death_of_the_profiler() -> None:
    line = (
        "import sys; from fireflyer.haiprof.attach.collect import *\n"
        "collect([int(sys.argv[1])], Options(seconds=600), None, lambda _: print(flush=True))"
    )
    with running(IDLE) as script:
        for _ in range(2):
            command = [sys.executable, "-c", line, str(script.pid)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as profiler:
                assert profiler.stdout is not None
                profiler.stdout.readline()
                profiler.kill()
            until(lambda: threads(script.pid) == 1)
            assert descriptors(script.pid) == ["0", "1", "2"]
        assert not attach(script.pid).failure


def test_a_profiler_that_died_before_the_answer_leaves_a_socket_that_is_replaced() -> None:
    with running(IDLE) as script:
        attach(script.pid, 0.05)
        with Target(script.pid) as target:
            target.wake()  # nobody listens: the agent leaves again
            until(lambda: threads(script.pid) == 1)
        import socket

        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(socket_path(script.pid, os.geteuid())))
        assert not attach(script.pid).failure
        assert not socket_path(script.pid, os.geteuid()).exists()


def test_a_process_whose_last_session_is_just_ending_is_attached_to() -> None:
    text = IDLE.replace(
        "outer()\n",
        "from fireflyer.haiprof.inside import prepare\n"
        "prepare._busy.acquire()\n"  # as the agent does until its thread ends
        "threading.Timer(0.3, prepare._busy.release).start()\n"
        "outer()\n",
    )
    with running(text) as script:
        assert not attach(script.pid).failure


def test_only_one_profiler_at_a_time() -> None:
    with running(IDLE) as script, Target(script.pid) as target:
        with (
            Session(target, Request(seconds=60.0)),
            Target(script.pid) as again,
            pytest.raises(ProfileError, match="is being profiled by another haiprof"),
        ):
            Session(again, Request(seconds=1.0))
        until(lambda: threads(script.pid) == 1)
        assert not attach(script.pid).failure


def test_the_agent_detaches_after_its_time_without_the_profiler() -> None:
    asked = Request(seconds=0.1)
    with (
        running(IDLE) as script,
        Target(script.pid) as target,
        Session(target, asked) as session,
    ):
        while not session.over:
            list(session.read())
        assert not session.failure
        until(lambda: threads(script.pid) == 1)


def test_unprepared_processes_are_not_signalled() -> None:
    script = "import time\nprint(flush=True)\nwhile True: time.sleep(0.01)"
    with running(script, prepared=False) as child:
        with pytest.raises(NotPrepared, match="is not prepared: start it with `haiprof run"):
            attach(child.pid)
        assert child.poll() is None


def test_a_process_that_gave_its_signal_away_is_not_signalled() -> None:
    gone = PREPARE + (
        "import signal, time, fireflyer.haiprof.inside.prepare as p\n"
        "signal.signal(p._prepared, signal.SIG_DFL)\n"
        "print(flush=True)\n"
        "while True: time.sleep(0.01)"
    )
    command = [sys.executable, "-c", gone]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(NotPrepared):
            attach(child.pid)
        assert child.poll() is None
        child.kill()


def test_stopped_dead_and_foreign_processes_get_a_clear_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(IDLE) as script:
        script.send_signal(signal.SIGSTOP)
        until(lambda: "T (stopped)" in Path(f"/proc/{script.pid}/status").read_text())
        with pytest.raises(ProfileError, match="is stopped: continue it first"):
            attach(script.pid)
        script.send_signal(signal.SIGCONT)
        until(lambda: "T (stopped)" not in Path(f"/proc/{script.pid}/status").read_text())
        assert not attach(script.pid).failure
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 12345)
            with pytest.raises(ProfileError, match="run haiprof as that user"):
                attach(script.pid)
        script.kill()
        until(lambda: "Z (zombie)" in Path(f"/proc/{script.pid}/status").read_text())
        with pytest.raises(ProfileError, match="is a zombie"):
            attach(script.pid)
    with pytest.raises(ProfileError, match="does not exist"):
        attach(script.pid)


def test_another_namespace_gets_a_clear_line() -> None:
    unshare = ["unshare", "--mount", sys.executable, "-c", IDLE]
    with subprocess.Popen(unshare, stderr=subprocess.PIPE) as child:
        if child.poll() is None:
            until(lambda: child.poll() is not None or has_mark(child.pid))
        if child.poll() is not None:
            pytest.skip("namespaces need root")
        with pytest.raises(ProfileError, match="another mount namespace: run haiprof inside"):
            attach(child.pid)
        child.kill()


def has_mark(pid: int) -> bool:
    return ENDING in Path(f"/proc/{pid}/maps").read_text()


def test_a_process_that_ends_during_the_session() -> None:
    asked = Request(seconds=60.0)
    with (
        running(IDLE) as script,
        Target(script.pid) as target,
        Session(target, asked) as session,
    ):
        script.kill()
        while not session.over:
            list(session.read())
        assert session.failure == "the process ended during the session"


def test_a_process_that_closes_the_session_is_not_said_to_have_ended() -> None:
    closes = (
        "import os, socket, sys, threading\n"
        "def close():\n"
        "    sys.stdin.readline()\n"
        "    socket.socket(fileno=os.dup(3)).shutdown(socket.SHUT_RDWR)\n"
        "threading.Thread(target=close).start()\n"
    )
    with (
        running(closes + IDLE, pipes=True) as script,
        Target(script.pid) as target,
        Session(target, Request(seconds=60.0)) as session,
    ):
        assert script.stdin is not None
        script.stdin.write(b"\n")
        script.stdin.flush()
        while not session.over:
            list(session.read())
        assert session.failure.startswith("the process ended the session")
        assert script.poll() is None


def test_a_process_at_its_exit_is_not_harmed() -> None:
    ending = PREPARE + "import sys\nprint(flush=True)\nsys.stdin.read()\n"
    for _ in range(cases(40)):
        command = [sys.executable, "-c", ending]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            with Target(child.pid) as target:
                child.stdin.close()  # from now on it is ending
                for _ in range(50):
                    try:
                        target.wake()
                    except ProfileError:
                        break
            assert child.wait() == 0


def test_a_forked_child_can_be_attached_to_and_leaves_the_session_of_its_parent() -> None:
    forks = PREPARE + (
        "import os, select, threading\n"
        "while not select.select([0], [], [], 0.05)[0]: pass\n"  # a blocked read hides the signal
        "if os.fork() == 0: print(os.getpid(), len(os.listdir('/proc/self/fd')), flush=True)\n"
        "while True: threading.Event().wait(0.01)\n"
    )
    command = [sys.executable, "-c", forks]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, process_group=0) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        try:
            until(lambda: is_prepared(parent.pid))
            with Target(parent.pid) as target, Session(target, Request(seconds=60.0)):
                parent.stdin.write(b"\n")
                parent.stdin.flush()
                child, files = map(int, parent.stdout.readline().split())
                assert files == 4  # 0, 1, 2 and the listing itself: not the session's socket
                assert not attach(child).failure
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_many_cycles_leave_nothing_behind() -> None:
    with running(IDLE) as script:
        attach(script.pid, 0.01)
        until(lambda: threads(script.pid) == 1)  # the agent has closed its files
        before = descriptors(script.pid)
        for _ in range(cases(200)):
            assert not attach(script.pid, 0.01).failure
        until(lambda: threads(script.pid) == 1)
        assert descriptors(script.pid) == before
        assert script.poll() is None
    assert not list(meeting_folder(os.geteuid()).glob(str(script.pid)))


@pytest.mark.full
def test_a_training_process_is_as_it_was_after_sessions_and_killed_profilers() -> None:
    assert endure(cycles=40, kills=10, seed=1).endswith("as it was")


def test_a_blocked_read_is_named() -> None:
    reads = PREPARE + "import os\nos.read(0, 1)\n"
    with running(reads, pipes=True) as script, Target(script.pid) as target:
        until(lambda: "blocked in read()" in target.obstacle())
        with pytest.raises(
            ProfileError, match=r"within 0\.1 s: .* blocked in read\(\), and answers when"
        ):
            Session(target, Request(seconds=1.0), timeout_s=0.1)
