"""The server may die and come back: what journals say, and two engines at once. More in conformance/."""

import os
import signal
from typing import Any

from tests.hai.conformance.host import host, sigkill

from fireflyer.hai.model.engine import RankExited

Stage = Any


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


def test_a_journal_with_a_line_that_is_no_record(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        gang = s.gang("report(os.getpid())\nforever()")
        server = host("local", gang)
        pids = {int(rank): int(pid) for rank, pid in await s.reports(2)}
        sigkill(server)
        victim = s.supervisor("n1")
        os.kill(victim, signal.SIGKILL)
        await s.gone(pids[1])
        with gang.directory.joinpath("n1.journal").open("a") as file:
            file.write("{}\n")
        engine = s.engine()
        await engine.recover(gang)
        events, end = await s.ended(engine)
        assert end.outcome == "lost"
        assert "n1" in end.reason
        assert "has an invalid line" in end.reason
        assert [e.rank for e in events if isinstance(e, RankExited)] == [0]
        assert not any(s.alive(pid) for pid in pids.values())

    stage.play(scene)


def test_what_an_earlier_server_kept_warm_is_given_back_by_the_next(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        first = s.engine()
        await first.launch(s.gang("pass"))
        await s.ended(first)
        await s.close(first)
        assert s.processes()
        await s.engine().release(s.task, s.folder / s.task)
        assert s.processes() == {}

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
