"""The server may die and come back: gangs run on, and nothing that happened meanwhile is missed."""

import os
import signal
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from fireflyer.hai.engines import RankExited, RankStarted
from fireflyer.hai.engines.messages import Freeze

Stage = Any

HOST = """
import asyncio, sys
import msgspec
from fireflyer.hai.engines import Gang
from fireflyer.hai.engines.local import LocalEngine

async def main():
    gang = msgspec.json.decode(sys.argv[1], type=Gang, dec_hook=lambda t, v: t(v))
    engine = LocalEngine(len(gang.nodes), preload=())
    await engine.launch(gang)
    async for event in engine.events():
        pass

asyncio.run(main())
"""


def host(gang: Any) -> subprocess.Popen[bytes]:
    """Another process that launches the gang and goes on watching it."""
    encoded = msgspec.json.encode(gang, enc_hook=str).decode()
    return subprocess.Popen([sys.executable, "-c", HOST, encoded])


def sigkill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_an_engine_closed_lets_go_and_another_takes_up(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        first = s.engine()
        gang = s.gang("report(os.getpid())\nforever()", ranks=2)
        await first.launch(gang)
        pids = {int(rank): int(pid) for rank, pid in await s.reports(4)}
        await s.close(first)
        assert [e async for e in first.events()]  # what it knew; then it ends
        assert all(s.alive(pid) for pid in pids.values())

        second = s.engine()
        await second.recover(gang)
        await second.recover(gang)
        events = await s.until(second, lambda e: e.rank == 3 or e.rank == 1)
        os.kill(pids[3], signal.SIGKILL)
        more, end = await s.ended(second)
        assert s.pids(events + more) == pids
        assert len([e for e in events + more if isinstance(e, RankStarted)]) == 4
        assert end.outcome == "failed"
        assert end.reason == f"rank 3 on n1 was killed by SIGKILL (pid {pids[3]})"

    stage.play(scene)


def test_sigkill_of_the_server_and_a_failure_while_it_is_away(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        gang = s.gang("report(os.getpid())\nforever()")
        server = host(gang)
        pids = {int(rank): int(pid) for rank, pid in await s.reports(2)}
        sigkill(server)
        assert all(s.alive(pid) for pid in pids.values())
        os.kill(pids[0], signal.SIGKILL)
        await s.gone(pids[0])

        engine = s.engine()
        await engine.recover(gang)  # n1 runs on until someone knows both nodes
        events, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert end.reason == f"rank 0 on n0 was killed by SIGKILL (pid {pids[0]})"
        assert s.exits(events) == {0: (None, signal.SIGKILL), 1: (None, signal.SIGKILL)}

    stage.play(scene)


def test_a_gang_that_finished_while_the_server_was_away(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        gang = s.gang("report(os.getpid())\nawait_gate()")
        server = host(gang)
        pids = [int(words[1]) for words in await s.reports(2)]
        sigkill(server)
        s.open_gate(2)
        for pid in pids:
            await s.gone(pid)
        engine = s.engine()
        await engine.recover(gang)
        events, end = await s.ended(engine)
        assert end.outcome == "finished"
        assert s.exits(events) == {0: (0, None), 1: (0, None)}
        await engine.launch(s.gang("pass", attempt=2))
        _, end = await s.ended(engine)
        assert (end.attempt, end.outcome) == (2, "finished")

    stage.play(scene)


def test_outcome_from_the_journals_when_the_supervisors_are_gone(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        first = s.engine()
        gang = s.gang("pass")
        await first.launch(gang)
        events, end = await s.ended(first)
        await first.release(s.task)
        assert s.processes() == {}
        second = s.engine()
        await second.recover(gang)
        again, same = await s.ended(second)
        assert same == end
        assert sorted(again, key=str) == sorted(events, key=str)

    stage.play(scene)


@pytest.mark.parametrize("damage", ["none", "line"])
def test_lost_when_supervisors_died_while_the_server_was_away(stage: Stage, damage: str) -> None:
    async def scene(s: Stage) -> None:
        gang = s.gang("report(os.getpid())\nforever()")
        server = host(gang)
        pids = {int(rank): int(pid) for rank, pid in await s.reports(2)}
        sigkill(server)
        victim = s.supervisor("n1")
        os.kill(victim, signal.SIGKILL)
        await s.gone(pids[1])
        if damage == "line":
            with gang.directory.joinpath("n1.journal").open("a") as file:
                file.write("{}\n")
        engine = s.engine()
        await engine.recover(gang)
        events, end = await s.ended(engine)
        assert end.outcome == "lost"
        assert "n1" in end.reason
        assert ("holds a line that is no record" in end.reason) == (damage == "line")
        assert [e.rank for e in events if isinstance(e, RankExited)] == [0]
        assert not any(s.alive(pid) for pid in pids.values())

    stage.play(scene)


def test_a_gang_that_was_never_launched_is_lost(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.recover(s.gang("pass"))
        events, end = await s.ended(engine)
        assert (events, end.outcome) == ([], "lost")
        assert end.reason == "n0 holds nothing of the attempt; n1 holds nothing of the attempt"

    stage.play(scene)


def test_a_suspend_cut_between_its_phases_is_completed(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        script = """
            from fireflyer.hai import suspend_requested, suspended
            report("up")
            calls = 1
            while not suspend_requested():
                calls += 1
                time.sleep(0.001)
            report("told", calls)
            suspended()
        """
        gang = s.gang(script)
        server = host(gang)
        await s.reports(2)
        for node in gang.nodes:
            s.ask(node, Freeze(attempt=1, grace_s=1000.0))
        sigkill(server)
        engine = s.engine()
        await engine.recover(gang)
        (_, _, one), (_, _, two) = await s.reports(2)
        assert one == two
        _, end = await s.ended(engine)
        assert end.outcome == "suspended"

    stage.play(scene)


def test_two_engines_may_watch_one_gang(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        first, second = s.engine(), s.engine()
        gang = s.gang("report('up')\nforever()")
        await first.launch(gang)
        await s.reports(2)
        await second.recover(gang)
        await second.stop(s.task, 1, 60.0)
        (events, end), (others, same) = await s.ended(first), await s.ended(second)
        assert end == same
        assert sorted(events, key=str) == sorted(others, key=str)

    stage.play(scene)
