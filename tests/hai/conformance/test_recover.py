"""The server may die and come back: gangs run on, and nothing that happened meanwhile is missed."""

import os
import signal
from typing import Any

import pytest
from tests.hai.conformance.host import host, sigkill
from tests.hai.engine.conftest import Stage

from fireflyer.errors import TaskError
from fireflyer.hai.model.engine import NodesChanged, RankExited, RankStarted
from fireflyer.hai.supervisor.messages import Freeze


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["stage"])


def test_an_engine_that_let_go_and_another_that_takes_up(stage: Stage) -> None:
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
        events = await s.until(second, lambda e: isinstance(e, RankStarted) and e.rank == 3)
        os.kill(pids[3], signal.SIGKILL)
        more, end = await s.ended(second)
        assert len([e for e in events + more if isinstance(e, RankStarted)]) == 4
        assert s.pids(events + more) == pids
        assert end.outcome == "failed"
        assert end.reason == f"rank 3 on {gang.nodes[1]} was killed by SIGKILL (pid {pids[3]})"

    stage.play(scene)


def test_sigkill_of_the_server_and_a_failure_while_it_is_away(stage: Stage, kind: str) -> None:
    async def scene(s: Stage) -> None:
        gang = s.gang("report(os.getpid())\nforever()")
        server = host(kind, gang)
        pids = {int(rank): int(pid) for rank, pid in await s.reports(2)}
        sigkill(server)
        assert all(s.alive(pid) for pid in pids.values())
        os.kill(pids[0], signal.SIGKILL)
        await s.gone(pids[0])
        engine = s.engine()
        await engine.recover(gang)
        events, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert end.reason == f"rank 0 on {gang.nodes[0]} was killed by SIGKILL (pid {pids[0]})"
        assert s.exits(events) == {0: (None, signal.SIGKILL), 1: (None, signal.SIGKILL)}

    stage.play(scene)


def test_a_gang_that_finished_while_the_server_was_away(stage: Stage, kind: str) -> None:
    async def scene(s: Stage) -> None:
        gang = s.gang("report(os.getpid())\nawait_gate()")
        server = host(kind, gang)
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


def test_the_journals_say_how_it_ended_when_no_supervisor_is_left(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        first = s.engine()
        gang = s.gang("sys.exit(5 * RANK)")
        await first.launch(gang)
        events, end = await s.ended(first)
        await first.release(s.task)
        assert s.processes() == {}
        second = s.engine()
        await second.recover(gang)
        again, same = await s.ended(second)
        assert (same.outcome, same.reason) == (end.outcome, end.reason)
        assert s.exits(again) == s.exits(events)

    stage.play(scene)


def test_lost_when_a_supervisor_died_while_the_server_was_away(stage: Stage, kind: str) -> None:
    async def scene(s: Stage) -> None:
        gang = s.gang("report(os.getpid())\nforever()")
        server = host(kind, gang)
        pids = {int(rank): int(pid) for rank, pid in await s.reports(2)}
        sigkill(server)
        os.kill(s.supervisor(gang.nodes[1]), signal.SIGKILL)
        await s.gone(pids[1])
        engine = s.engine()
        await engine.recover(gang)
        events, end = await s.ended(engine)
        assert end.outcome == "lost"
        assert gang.nodes[1] in end.reason
        assert [e.rank for e in events if isinstance(e, RankExited)] == [0]
        assert not any(s.alive(pid) for pid in pids.values())

    stage.play(scene)


def test_a_gang_that_was_never_launched_is_lost(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        gang = s.gang("pass")
        await engine.recover(gang)
        events, end = await s.ended(engine)
        assert (events, end.outcome) == ([], "lost")
        assert end.reason == "; ".join(
            f"{node} has no processes of the attempt" for node in gang.nodes
        )

    stage.play(scene)


def test_a_suspend_cut_between_its_phases_is_completed(stage: Stage, kind: str) -> None:
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
        server = host(kind, gang)
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


def test_a_drained_node_says_so_until_it_is_taken_back(stage: Stage) -> None:
    async def changed(engine: Any) -> None:
        async for event in engine.events():
            if isinstance(event, NodesChanged):
                return

    async def scene(s: Stage) -> None:
        engine = s.engine()
        name = engine.nodes()[1].name
        assert engine.nodes()[1].state == "up"
        await engine.drain(name, "gemm: mismatch | twice")
        await changed(engine)
        (node,) = (n for n in engine.nodes() if n.state != "up")
        assert (node.name, node.state) == (name, "drained")
        assert "gemm: mismatch | twice" in node.reason
        await engine.undrain(name)
        while {node.state for node in engine.nodes()} != {"up"}:
            await changed(engine)
        with pytest.raises(TaskError, match="no node 'n99'"):
            await engine.drain("n99", "")

    stage.play(scene)
