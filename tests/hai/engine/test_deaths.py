"""What is left when one of the platform's own processes dies: never a rank, nor anything a rank started."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT_S

from fireflyer.hai.engines import link, local
from fireflyer.hai.engines.local import LocalEngine
from fireflyer.hai.model.engine import Gang, GangEnded

Stage = Any

BROOD = """
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            report("daemon", os.getpid())
            forever()
        os._exit(0)
    os.wait()
    report("rank", os.getpid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forever()
"""


@pytest.mark.parametrize("start", ["fork", "exec"])
@pytest.mark.parametrize("victim", ["supervisor", "guard"])
def test_death_of_supervisor_or_guard_takes_everything_along(
    stage: Stage, victim: str, start: Any
) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang(BROOD, start=start))
        pids = [int(words[2]) for words in await s.reports(4)]
        assert all(s.alive(pid) for pid in pids)
        os.kill(getattr(s, victim)("n1"), signal.SIGKILL)
        _, end = await s.ended(engine)
        assert (end.outcome, end.reason) == ("lost", "the supervisor of n1 died")
        assert not any(s.alive(pid) for pid in pids)
        left = s.processes().values()  # n0's supervisor and fork server stay warm
        assert all("fireflyer.hai." in command for command in left), left
        assert not any(command.endswith("n1") for command in left)

        await engine.launch(s.gang("pass", attempt=2, start=start))
        _, end = await s.ended(engine)
        assert (end.attempt, end.outcome) == (2, "finished")

    stage.play(scene)


def test_death_of_all_supervisors_at_once(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang(BROOD))
        await s.reports(4)
        for node in ("n0", "n1"):
            os.kill(s.supervisor(node), signal.SIGKILL)
        _, end = await s.ended(engine)
        assert end.outcome == "lost"
        assert end.reason.count("died") == 2
        assert s.processes() == {}

    stage.play(scene)


def test_an_idle_fork_server_may_die_and_is_replaced(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        await engine.launch(s.gang("report('up')\nforever()", nodes=1))
        await s.reports(1)
        first = s.fork_server("n0")
        os.kill(first, signal.SIGKILL)
        await s.gone(first)
        await engine.stop(s.task, 1, 60.0)
        _, end = await s.ended(engine)
        assert end.outcome == "stopped"
        await engine.launch(s.gang("report('up')\nforever()", nodes=1, attempt=2))
        await s.reports(1)
        assert s.fork_server("n0") != first

    stage.play(scene)


def test_a_fork_server_that_dies_at_its_start_fails_the_attempt(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        broken: Path = s.folder / "broken"
        broken.mkdir()
        broken.joinpath("sitecustomize.py").write_text(
            "import os, signal, sys\n"
            "if 'fireflyer.hai.forkserver' in sys.orig_argv: os.kill(os.getpid(), signal.SIGKILL)"
        )
        env = {"PYTHONPATH": str(broken)}
        await engine.launch(s.gang("pass", nodes=1, env=env))
        events, end = await s.ended(engine)
        assert events == []
        assert end.outcome == "failed"
        assert end.reason.startswith(
            "the fork server on n0 was killed by SIGKILL before it had started the ranks"
        )
        await engine.launch(s.gang("pass", nodes=1, attempt=2))
        _, end = await s.ended(engine)
        assert end.outcome == "finished"

    stage.play(scene)


def test_a_frozen_fork_server_does_not_keep_a_stop_waiting(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        await engine.launch(s.gang("pass", nodes=1))
        await s.ended(engine)
        frozen = s.fork_server("n0")
        os.kill(frozen, signal.SIGSTOP)
        await engine.launch(s.gang("pass", nodes=1, attempt=2))
        await engine.stop(s.task, 2, 0.0)
        _, end = await s.ended(engine)
        assert end.outcome == "stopped"
        assert not s.alive(frozen)

    stage.play(scene)


def test_a_stop_does_not_wait_for_the_imports_of_the_fork_server(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        pipe = s.folder / "never"
        os.mkfifo(pipe)
        (s.folder / "stuck.py").write_text(f"open({str(pipe)!r}).read()")
        engine = s.engine(2, preload=("stuck",))
        env = {"PYTHONPATH": str(s.folder)}
        await engine.launch(s.gang("forever()", env=env))
        await engine.stop(s.task, 1, 3600.0)
        events, end = await s.ended(engine)
        assert (end.outcome, events) == ("stopped", [])
        assert s.processes().keys() <= {s.supervisor(n) for n in ("n0", "n1")} | {
            s.guard(n) for n in ("n0", "n1")
        }

    stage.play(scene)


def test_the_next_attempt_is_forked_from_the_same_server(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        servers, supervisors = [], []
        for attempt in (1, 2, 3):
            await engine.launch(s.gang("report(os.environ['FIREFLYER_ATTEMPT'])", attempt=attempt))
            _, end = await s.ended(engine)
            assert (end.attempt, end.outcome) == (attempt, "finished")
            servers.append([s.fork_server(node) for node in ("n0", "n1")])
            supervisors.append([s.supervisor(node) for node in ("n0", "n1")])
            assert {words[1] for words in await s.reports(2)} == {str(attempt)}
        assert servers[0] == servers[1] == servers[2]
        assert supervisors[0] == supervisors[1] == supervisors[2]
        await engine.release(s.task)
        assert s.processes() == {}

    stage.play(scene)


def test_release_ends_what_still_runs(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang(BROOD))
        await s.reports(4)
        await engine.release(s.task)
        assert s.processes() == {}
        _, end = await s.ended(engine)
        assert isinstance(end, GangEnded)
        assert end.outcome == "stopped"

    stage.play(scene)


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_a_supervisor_that_dies_before_it_is_told_to_launch(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    real, guards = LocalEngine._link, {}

    def spawned(task: str, directory: Path, name: str) -> int:
        guards[name] = link.spawn(task, directory, name)
        return guards[name]

    async def linked(self: LocalEngine, gang: Gang, name: str) -> Any:
        made = await real(self, gang, name)
        if name == node and made is not None:
            os.kill(
                guards[name], signal.SIGKILL
            )  # its /proc says nothing until its exec is complete
            await made.gone.wait()
        return made

    async def scene(s: Stage) -> None:
        engine = s.engine()
        monkeypatch.setattr(local, "spawn", spawned)
        monkeypatch.setattr(LocalEngine, "_link", linked)
        await engine.launch(s.gang("forever()"))
        _, end = await s.ended(engine)
        assert (end.outcome, end.lost) == ("lost", (node,)), end

    stage.play(scene)


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_a_supervisor_that_dies_before_anyone_connects(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    def stillborn(task: str, directory: Path, name: str) -> int:
        pid = link.spawn(task, directory, name)
        if name == node:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid

    async def scene(s: Stage) -> None:
        engine = s.engine()
        monkeypatch.setattr(local, "spawn", stillborn)
        await engine.launch(s.gang("forever()"))
        _, end = await s.ended(engine)
        assert (end.outcome, end.lost) == ("lost", (node,)), end

    stage.play(scene)


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_guard_and_supervisor_killed_in_the_same_instant(stage: Stage, start: Any) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = """
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            report(os.getpid(), child.pid)
            forever()
        """
        await engine.launch(s.gang(script, ranks=2, start=start))
        reports = await s.reports(4)
        doomed = {int(pid) for words in reports for pid in words[1:] if int(words[0]) in (2, 3)}
        pair = [s.guard("n1"), s.supervisor("n1")]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pair:
                os.kill(pid, number)
        _, end = await s.ended(engine)
        assert end.outcome == "lost"
        assert len(doomed) == 4
        assert not doomed & s.processes().keys()

    stage.play(scene)


def test_a_preload_that_breaks_or_starts_a_thread_fails_the_attempt(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        library: Path = s.folder / "library"
        library.mkdir()
        for name, text in {
            "breaks": "1 / 0",
            "threads": "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
        }.items():
            library.joinpath(f"{name}.py").write_text(text)
        env = {"PYTHONPATH": str(library)}
        log = s.folder / s.task / "n0.supervisor.log"
        for attempt, (name, why) in enumerate(
            [("breaks", "ZeroDivisionError"), ("threads", "2 threads after the imports")], start=1
        ):
            engine = s.engine(1, preload=("not_installed", name))
            await engine.launch(s.gang("pass", nodes=1, env=env, attempt=attempt))
            events, end = await s.ended(engine)
            assert (events, end.outcome) == ([], "failed")
            assert "the fork server on n0 exited with status 1" in end.reason
            assert why in log.read_text()
            await engine.release(s.task)

    stage.play(scene)


def test_a_full_disk_under_the_journal_fails_the_attempt(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        gang = s.gang("report('up')\nforever()", nodes=1, start="exec")
        gang.directory.mkdir(parents=True)
        gang.directory.joinpath("n0.journal").symlink_to("/dev/full")
        await engine.launch(gang)
        _, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert end.reason == "n0 cannot write its journal: No space left on device"
        left = s.processes().values()
        assert all("fireflyer.hai." in command for command in left), left

    stage.play(scene)


def test_a_supervisor_that_nobody_needs_leaves() -> None:
    code = """
import os, socket
from fireflyer._native.hai import set_child_subreaper
from fireflyer.hai.supervisor import supervise
supervise.IDLE_S = 0.05
listener = socket.socket(socket.AF_UNIX)
listener.bind("")
listener.listen()
guard = os.getpid()
pid = os.fork()
if pid == 0:
    supervise.Supervisor(listener=listener.fileno(), guard=guard).run()
assert os.waitpid(pid, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)
