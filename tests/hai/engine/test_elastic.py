"""Elastic gangs: who goes on when ranks or nodes are lost, who comes, and what the end is."""

import asyncio
import os
import signal
from typing import Any

import pytest
from tests.hai.conformance.host import host, sigkill

from fireflyer.hai.model.engine import GangEnded, RankExited, RankJoined, RankStarted

Stage = Any

# What HaiScale and its elastic steps do for a job. A newcomer waits until the test lets it in.
MEMBER = """
    from fireflyer.hai import hold, suspend_requested, suspended
    from fireflyer.hai.rank import begun, between
    again = int(os.environ["FIREFLYER_INCARNATION"])
    if again:
        assert os.environ["FIREFLYER_JOIN"] == os.environ["FIREFLYER_DOORS"]
    else:
        open(os.environ["FIREFLYER_DOORS"], "a").close()
    def member():
        report("up", os.getpid(), again)
        if again:
            await_gate("DOOR")
        hold(again)
        between()
        assert not suspend_requested()
        report("in", again)
"""


def lines(reports: list[list[str]], word: str) -> dict[int, list[str]]:
    """rank -> the words behind `word`"""
    assert {words[1] for words in reports} == {word}, reports
    return {int(words[0]): words[2:] for words in reports}


async def up(s: Stage, count: int) -> dict[int, int]:
    """Founders: each reports twice. rank -> pid"""
    seen = await s.reports(2 * count)
    return {int(w[0]): int(w[2]) for w in seen if w[1] == "up"}


def is_exit(rank: int, incarnation: int = 0) -> Any:
    return lambda e: isinstance(e, RankExited) and (e.rank, e.incarnation) == (rank, incarnation)


def is_in(rank: int, incarnation: int = 1) -> Any:
    return lambda e: isinstance(e, RankJoined) and (e.rank, e.incarnation) == (rank, incarnation)


def history(events: list[Any], rank: int) -> list[tuple[str, int]]:
    return [(type(e).__name__, e.incarnation) for e in events if getattr(e, "rank", None) == rank]


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_a_killed_rank_comes_back_and_the_gang_finishes(stage: Stage, start: Any) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = MEMBER + "    member()\n    await_gate()\n"
        await engine.launch(s.gang(script, ranks=2, start=start, elastic=True, rejoins=3))
        pids = await up(s, 4)
        os.kill(pids[3], signal.SIGKILL)
        (newcomer,) = lines(await s.reports(1), "up").items()
        assert (newcomer[0], newcomer[1][1]) == (3, "1")
        s.let_in(1)
        assert lines(await s.reports(1), "in") == {3: ["1"]}
        events = await s.until(engine, is_in(3))
        s.open_gate(4)
        more, end = await s.ended(engine)
        assert (end.outcome, end.reason) == ("finished", "every rank returned 0")
        assert history(events + more, 3) == [
            ("RankStarted", 0), ("RankExited", 0), ("RankStarted", 1), ("RankJoined", 1), ("RankExited", 1),
        ]  # fmt: skip
        assert history(events + more, 0) == [("RankStarted", 0), ("RankExited", 0)]

    stage.play(scene)


def test_what_a_dead_rank_had_started_goes_with_it(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = MEMBER + (
            "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
            "    report('child', child.pid)\n    member()\n    forever()\n"
        )
        await engine.launch(s.gang(script, nodes=1, ranks=2, elastic=True))
        seen = await s.reports(6)
        child = {int(w[0]): int(w[2]) for w in seen if w[1] == "child"}
        pids = {int(w[0]): int(w[2]) for w in seen if w[1] == "up"}
        os.kill(pids[1], signal.SIGKILL)
        await s.gone(child[1])
        assert s.alive(child[0])
        await engine.stop(s.task, 1, 0.0)
        _, end = await s.ended(engine)
        assert end.outcome == "stopped"

    stage.play(scene)


@pytest.mark.sample(2)
@pytest.mark.parametrize("victim", ["supervisor", "guard", "ranks"])
def test_a_lost_node_leaves_the_others_running_and_is_launched_on_again(
    stage: Stage, victim: str
) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = MEMBER + "    member()\n    await_gate()\n"
        await engine.launch(s.gang(script, ranks=2, elastic=True, rejoins=1))
        pids = await up(s, 4)
        lost = [pids[2], pids[3]] if victim == "ranks" else [getattr(s, victim)("n1")]
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        newcomers = lines(await s.reports(2), "up")
        assert {rank: words[1] for rank, words in newcomers.items()} == {2: "1", 3: "1"}
        assert s.alive(pids[0])
        assert s.alive(pids[1])
        s.let_in(2)
        assert lines(await s.reports(2), "in").keys() == {2, 3}
        s.open_gate(4)
        events, end = await s.ended(engine)
        assert (end.outcome, end.reason) == ("finished", "every rank returned 0")
        how = (None, signal.SIGKILL) if victim == "ranks" else (None, None)
        for rank in (2, 3):
            first = next(e for e in events if is_exit(rank)(e))
            assert (first.code, first.signal) == how
            assert history(events, rank)[:3] == [
                ("RankStarted", 0), ("RankExited", 0), ("RankStarted", 1),
            ]  # fmt: skip

    stage.play(scene)


def test_two_deaths_at_once_on_two_nodes(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = MEMBER + "    member()\n    await_gate()\n"
        await engine.launch(s.gang(script, ranks=2, elastic=True, rejoins=1))
        pids = await up(s, 4)
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pids[3], signal.SIGKILL)
        assert lines(await s.reports(2), "up").keys() == {0, 3}
        s.let_in(2)
        assert lines(await s.reports(2), "in").keys() == {0, 3}
        s.open_gate(4)
        _, end = await s.ended(engine)
        assert end.outcome == "finished"

    stage.play(scene)


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_a_newcomer_that_dies_at_once_is_started_within_the_budget(
    stage: Stage, start: Any
) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = MEMBER + "    if again:\n        sys.exit(9)\n    member()\n    await_gate()\n"
        await engine.launch(s.gang(script, ranks=1, start=start, elastic=True, rejoins=3))
        pids = await up(s, 2)
        os.kill(pids[1], signal.SIGKILL)
        events = await s.until(engine, is_exit(1, 3))
        exits = [(e.incarnation, e.code, e.joined) for e in events if isinstance(e, RankExited)]
        assert exits == [(0, None, True), (1, 9, False), (2, 9, False), (3, 9, False)]
        s.open_gate(1)
        more, end = await s.ended(engine)
        assert (end.outcome, end.reason) == (
            "finished", "all remaining ranks returned 0 (1 of 2)",
        )  # fmt: skip
        assert not [e for e in more if isinstance(e, RankStarted)]

    stage.play(scene)


def test_before_newcomers_can_join_a_death_ends_the_attempt(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = "    report('up', os.getpid())\n    forever()\n"
        await engine.launch(s.gang(script, elastic=True, rejoins=3))
        pids = {rank: int(words[0]) for rank, words in lines(await s.reports(2), "up").items()}
        os.kill(pids[1], signal.SIGKILL)
        _, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert end.reason == f"rank 1 on n1 was killed by SIGKILL (pid {pids[1]})"

    stage.play(scene)


def test_the_rest_gives_up(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = MEMBER + "    member()\n    await_gate()\n    sys.exit(5)\n"
        await engine.launch(s.gang(script, elastic=True, rejoins=0))
        await up(s, 2)
        s.open_gate(1)
        await s.until(engine, lambda e: isinstance(e, RankExited))
        s.open_gate(1)
        (exit_,), end = await s.ended(engine)
        assert end.outcome == "failed"
        assert end.reason == (
            "all ranks have ended, the last one: "
            f"rank {exit_.rank} on {exit_.node} exited with status 5"
        )

    stage.play(scene)


def test_without_members_the_waiting_newcomers_are_ended(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = MEMBER + "    member()\n    forever()\n"
        await engine.launch(s.gang(script, elastic=True, rejoins=3))
        pids = await up(s, 2)
        os.kill(pids[1], signal.SIGKILL)
        assert lines(await s.reports(1), "up").keys() == {1}
        os.kill(pids[0], signal.SIGKILL)
        events, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert (
            end.reason == "all ranks have ended, the last one: rank 0 on n0 was killed by SIGKILL"
        )
        (last,) = [e for e in events if is_exit(1, 1)(e)]
        assert (last.signal, last.joined) == (signal.SIGKILL, False)

    stage.play(scene)


def test_a_death_behind_the_first_return_is_a_failure(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = MEMBER + "    member()\n    if RANK == 0:\n        sys.exit(0)\n    forever()\n"
        await engine.launch(s.gang(script, elastic=True, rejoins=3))
        pids = await up(s, 2)
        await s.until(engine, is_exit(0))
        os.kill(pids[1], signal.SIGKILL)
        events, end = await s.ended(engine)
        assert end.outcome == "failed"
        assert end.reason == "rank 1 on n1 was killed by SIGKILL after other ranks had returned 0"
        assert history(events, 1)[-1] == ("RankExited", 0), "nobody takes its place"

    stage.play(scene)


STEPS = """
    member()
    number = 0
    while True:
        number += 1
        begun(again, number)
        if suspend_requested():
            report("told", again, number)
            suspended()
        time.sleep(0.001)
"""


def test_suspend_while_a_newcomer_waits(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        # Whoever waits there is turned away once all members have left.
        turned_away = 'await_gate("DOOR")\n            sys.exit(1)\n'
        script = MEMBER.replace('await_gate("DOOR")\n', turned_away) + STEPS
        await engine.launch(s.gang(script, ranks=2, elastic=True, rejoins=3))
        pids = await up(s, 4)
        os.kill(pids[2], signal.SIGKILL)
        assert lines(await s.reports(1), "up").keys() == {2}
        await engine.suspend(s.task, 1, 1000.0)
        told = lines(await s.reports(3), "told")
        assert told.keys() == {0, 1, 3}
        assert len({tuple(words) for words in told.values()}) == 1
        s.let_in(1)
        events, end = await s.ended(engine)
        assert (end.outcome, end.reason) == ("suspended", "")
        assert {e.rank for e in events if isinstance(e, RankExited) and e.suspended} == {0, 1, 3}
        assert max(e.incarnation for e in events if hasattr(e, "incarnation")) == 1

    stage.play(scene)


def test_a_suspend_or_stop_brings_no_newcomers(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = (
            MEMBER
            + "    member()\n    signal.signal(signal.SIGTERM, lambda *_: None)\n    forever()\n"
        )
        await engine.launch(s.gang(script, ranks=2, elastic=True, rejoins=3))
        pids = await up(s, 4)
        await engine.suspend(s.task, 1, 1000.0)
        os.kill(pids[1], signal.SIGKILL)
        await s.until(engine, is_exit(1))
        await engine.stop(s.task, 1, 0.0)
        events, end = await s.ended(engine)
        assert end.outcome == "stopped"
        assert not [e for e in events if isinstance(e, RankStarted)]

    stage.play(scene)


def test_the_server_is_killed_and_the_next_one_brings_the_newcomers(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        script = MEMBER + "    member()\n    await_gate()\n"
        gang = s.gang(script, ranks=2, elastic=True, rejoins=2)
        server = host("local", gang)
        pids = await up(s, 4)
        sigkill(server)
        os.kill(pids[1], signal.SIGKILL)
        await s.gone(pids[1])
        supervisor = s.supervisor("n1")
        os.kill(supervisor, signal.SIGKILL)
        await s.gone(pids[3])
        assert s.alive(pids[0])
        engine = s.engine()
        await engine.recover(gang)
        assert lines(await s.reports(3), "up").keys() == {1, 2, 3}
        s.let_in(3)
        assert lines(await s.reports(3), "in").keys() == {1, 2, 3}
        await s.close(engine)
        again = s.engine()
        await again.recover(gang)  # all is in the journals
        s.open_gate(4)
        events, end = await s.ended(again)
        assert (end.outcome, end.reason) == ("finished", "every rank returned 0")
        for rank in (1, 2, 3):
            assert history(events, rank) == [
                ("RankStarted", 0), ("RankExited", 0),
                ("RankStarted", 1), ("RankJoined", 1), ("RankExited", 1),
            ]  # fmt: skip
        first = s.engine()
        await first.recover(gang)
        assert isinstance((await s.ended(first))[1], GangEnded)

    stage.play(scene)


def test_an_attempt_that_ends_while_the_server_is_away(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        script = MEMBER + "    member()\n    await_gate()\n"
        gang = s.gang(script, elastic=True, rejoins=2)
        server = host("local", gang)
        pids = await up(s, 2)
        sigkill(server)
        os.kill(pids[0], signal.SIGKILL)
        await s.gone(pids[0])
        s.open_gate(1)
        await s.gone(pids[1])
        engine = s.engine()
        await engine.recover(gang)
        _, end = await s.ended(engine)
        assert (end.outcome, end.reason) == (
            "finished",
            "all remaining ranks returned 0 (1 of 2)",
        )

    stage.play(scene)


def test_a_node_that_cannot_be_launched_on_again_costs_its_budget_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = MEMBER + "    member()\n    await_gate()\n"
        await engine.launch(s.gang(script, elastic=True, rejoins=2))
        await up(s, 2)

        def refused(*_: Any) -> int:
            raise BlockingIOError(11, "no more processes")

        monkeypatch.setattr("fireflyer.hai.engines.local.spawn", refused)
        os.kill(s.supervisor("n1"), signal.SIGKILL)
        events = await s.until(engine, is_exit(1, 2))
        assert [e.incarnation for e in events if isinstance(e, RankExited)] == [0, 1, 2]
        s.open_gate(1)
        _, end = await s.ended(engine)
        assert end.outcome == "finished"

    stage.play(scene)


def test_a_stop_while_a_node_is_launched_on_again(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = MEMBER + "    member()\n    forever()\n"
        await engine.launch(s.gang(script, ranks=1, elastic=True, rejoins=3))
        await up(s, 2)
        os.kill(s.supervisor("n1"), signal.SIGKILL)
        await s.until(engine, is_exit(1))
        await asyncio.gather(engine.stop(s.task, 1, 0.0), engine.stop(s.task, 1, 0.0))
        _, end = await s.ended(engine)
        assert end.outcome == "stopped"

    stage.play(scene)
