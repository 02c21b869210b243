"""How a gang ends, by every way that does not kill the platform's own processes."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, Literal

import pytest

from fireflyer.hai.model.engine import RankExited, RankStarted
from fireflyer.hai.supervisor.journal import read_journal
from fireflyer.hai.supervisor.messages import PartEnded

Stage = Any
Start = Literal["fork", "exec"]
both_starts = pytest.mark.parametrize("start", ["fork", "exec"])


def test_an_exception_is_in_the_log_without_frames_of_ours(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang("print('before')\n1 / 0", nodes=1))
        _, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert "exited with status 1" in end.reason
        log = s.log(0).splitlines()
        assert log[:2] == ["before", "Traceback (most recent call last):"]
        assert log[-1] == "ZeroDivisionError: division by zero"
        assert "fireflyer" not in s.log(0)

    stage.play(scene)


def test_sigkill_of_a_rank_kills_what_left_its_group_too(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = """
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    report("daemon", os.getpid())
                    forever()
                os._exit(0)
            os.wait()
            report("rank", os.getpid())
            forever()
        """
        await engine.launch(s.gang(script))
        words = await s.reports(4)
        ranks = {int(w[0]): int(w[2]) for w in words if w[1] == "rank"}
        daemons = [int(w[2]) for w in words if w[1] == "daemon"]
        assert len(daemons) == 2
        os.kill(ranks[1], signal.SIGKILL)
        events, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert end.reason == f"rank 1 on n1 was killed by SIGKILL (pid {ranks[1]})"
        assert not any(s.alive(pid) for pid in [*ranks.values(), *daemons])
        assert s.pids(events) == ranks
        left = s.processes().values()
        assert all("fireflyer.hai." in command for command in left), left

    stage.play(scene)


def test_daemons_of_a_finished_gang_are_killed(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        script = """
            reported, write = os.pipe()
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    report("daemon", os.getpid())
                    os.close(write)
                    forever()
                os._exit(0)
            os.close(write)
            os.read(reported, 1)  # a rank that ends earlier has the daemon killed before it reports
            os.wait()
        """
        await engine.launch(s.gang(script, nodes=1))
        _, end = await s.ended(engine)
        assert end.outcome == "finished"
        ((_, _, pid),) = await s.reports(1)
        assert not s.alive(int(pid))

    stage.play(scene)


@both_starts
def test_stop_gives_ranks_time_to_leave(stage: Stage, start: Start) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = """
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
            report("up")
            forever()
        """
        gang = s.gang(script, start=start)
        await engine.launch(gang)
        await s.reports(2)
        await engine.stop(s.task, 1, 1000.0)
        events, end = await s.ended(engine)
        assert (end.outcome, end.reason) == ("stopped", "")
        assert s.exits(events) == {0: (5, None), 1: (5, None)}

    stage.play(scene)


def test_stop_kills_a_rank_that_ignores_it_after_the_grace(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = """
            if RANK == 1:
                signal.signal(signal.SIGTERM, lambda *_: report("ignored"))
            report("up")
            forever()
        """
        await engine.launch(s.gang(script))
        await s.reports(2)
        await engine.stop(s.task, 1, 1000.0)
        assert await s.reports(1) == [["1", "ignored"]]
        events = await s.until(engine, lambda e: isinstance(e, RankExited))
        await engine.stop(s.task, 1, 0.0)  # the shorter grace counts
        more, end = await s.ended(engine)
        events += more
        assert end.outcome == "stopped"
        assert end.reason == "rank 1 had to be killed after the grace period"
        assert s.exits(events) == {0: (None, signal.SIGTERM), 1: (None, signal.SIGKILL)}

    stage.play(scene)


def test_stop_reaches_frozen_ranks_and_those_still_starting(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang("os.kill(os.getpid(), signal.SIGSTOP)"))
        await engine.stop(s.task, 1, 0.0)
        _, end = await s.ended(engine)
        assert end.outcome == "stopped"

    stage.play(scene)


@both_starts
@pytest.mark.parametrize("what", ["missing", "folder", "cwd"])
def test_what_cannot_start_fails_with_one_line(stage: Stage, start: Start, what: str) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        missing = s.folder / "nothing" / "here.py"
        gang, reason = {
            "missing": (s.gang(missing, start=start), f"the script {missing} does not exist"),
            "folder": (s.gang(s.folder, start=start), f"the script {s.folder} is not a file"),
            "cwd": (
                s.gang("pass", cwd=str(missing), start=start),
                f"the working directory {missing} does not exist",
            ),
        }[what]
        await engine.launch(gang)
        events, end = await s.ended(engine)
        assert (end.outcome, end.reason) == ("failed", reason)
        assert events == []

    stage.play(scene)


def test_an_argument_that_no_process_can_have(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        await engine.launch(s.gang("pass", nodes=1, args=("a\0b",), start="exec"))
        events, end = await s.ended(engine)
        assert (end.outcome, end.reason) == (
            "failed",
            "n0 cannot start the ranks: [Errno 22] Invalid argument",
        )
        assert events == []

    stage.play(scene)


def test_a_launch_that_no_frame_holds_fails_and_leaves_the_node(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang("pass", args=("x" * (17 << 20),)))
        events, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert end.reason.startswith("cannot start: a frame of ")
        assert events == []

    stage.play(scene)


def test_a_folder_that_cannot_be_made_fails_the_launch(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        gang = s.gang("pass")
        gang.directory.parent.write_text("a file where the task's folder should be")
        await engine.launch(gang)
        events, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert end.reason.startswith("cannot start: ")
        assert events == []

    stage.play(scene)


def test_calls_repeated_and_calls_for_nobody_do_nothing(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        gang = s.gang("report('up')")
        await asyncio.gather(engine.launch(gang), engine.launch(gang))
        events, _ = await s.ended(engine)
        assert sorted(s.exits(events)) == [0, 1]
        await engine.launch(gang)
        await engine.stop(s.task, 1, 1.0)
        await engine.suspend(s.task, 1, 1.0)
        await engine.stop("t0", 1, 1.0)
        await engine.suspend(s.task, 2, 1.0)
        await engine.release("t0")
        await engine.launch(s.gang("report('up')", attempt=2))
        events, end = await s.ended(engine)
        assert end.attempt == 2
        assert sorted(s.exits(events)) == [0, 1]
        assert len(await s.reports(4)) == 4

    stage.play(scene)


def test_the_journal_holds_what_was_told(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        gang = s.gang("pass", ranks=2)
        await engine.launch(gang)
        events, _ = await s.ended(engine)
        for node in gang.nodes:
            path: Path = gang.directory / f"{node}.journal"
            records = read_journal(path)
            assert [r.seq for r in records] == [1, 2, 3, 4, 5]
            told = [e for e in events if isinstance(e, RankStarted | RankExited) and e.node == node]
            assert [r.event for r in records[:-1]] == told
            assert isinstance(records[-1].event, PartEnded)
            assert gang.secret not in path.read_text()
            path.write_bytes(path.read_bytes().rstrip(b"\0")[:-5])
            assert read_journal(path) == records[:-1]

    stage.play(scene)
