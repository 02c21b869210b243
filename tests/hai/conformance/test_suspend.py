"""Suspend: one call number on all ranks of all nodes; the grace; what counts as suspended."""

import signal

import pytest
from tests.hai.engine.conftest import Stage

from fireflyer.hai.model.engine import RankExited

LOOP = """
    from fireflyer.hai import suspend_requested, suspended
    report("up")
    calls = 1
    while not suspend_requested():
        calls += 1
        time.sleep(0.0002 * (1 + 3 * RANK))
    report("told", calls)
    suspended()
"""


@pytest.mark.sample(1)
def test_all_ranks_are_told_at_one_call_and_resume_elsewhere(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(4)
        names = [node.name for node in engine.nodes()]
        script = s.script(LOOP)
        for attempt, nodes in enumerate(((0, 1), (2, 3), (3, 0)), 1):
            wanted = tuple(names[i] for i in nodes)
            await engine.launch(s.gang(script, ranks=2, attempt=attempt, on=wanted))
            await s.reports(4)
            await engine.suspend(s.task, attempt, 1000.0)
            told = await s.reports(4)
            assert {words[1] for words in told} == {"told"}
            assert {words[0] for words in told} == {"0", "1", "2", "3"}
            assert len({words[2] for words in told}) == 1
            events, end = await s.ended(engine)
            assert (end.attempt, end.outcome, end.reason) == (attempt, "suspended", "")
            exits = [e for e in events if isinstance(e, RankExited)]
            assert [(e.code, e.suspended) for e in exits] == [(0, True)] * 4
            await engine.release(s.task)
            assert s.processes() == {}

    stage.play(scene)


def test_repeated_before_the_first_call_it_is_answered_at_call_1(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang("    report('here')\n    await_gate()\n" + LOOP))
        await s.reports(2)
        await engine.suspend(s.task, 1, 1000.0)
        await engine.suspend(s.task, 1, 1000.0)
        s.open_gate(2)
        assert {words[2] for words in await s.reports(4) if words[1] == "told"} == {"1"}
        _, end = await s.ended(engine)
        assert end.outcome == "suspended"

    stage.play(scene)


def test_a_rank_that_never_asks_is_killed_after_the_grace(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang("report('up')\nforever()"))
        await s.reports(2)
        await engine.suspend(s.task, 1, 0.05)
        events, end = await s.ended(engine)
        assert end.outcome == "suspended"
        assert "had to be killed after the grace" in end.reason
        assert s.exits(events) == {0: (None, signal.SIGKILL), 1: (None, signal.SIGKILL)}

    stage.play(scene)


def test_ranks_that_never_ask_and_catch_sigterm_get_it_and_save(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = """
            def save(*_):
                report("saved")
                sys.exit(0)
            signal.signal(signal.SIGTERM, save)
            report("up")
            forever()
        """
        await engine.launch(s.gang(script))
        await s.reports(2)
        await engine.suspend(s.task, 1, 1000.0)
        assert {words[1] for words in await s.reports(2)} == {"saved"}
        events, end = await s.ended(engine)
        assert (end.outcome, end.reason) == ("suspended", "")
        assert s.exits(events) == {0: (0, None), 1: (0, None)}

    stage.play(scene)


def test_ranks_that_ask_are_told_and_not_signalled(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        handler = """
    from fireflyer.hai import suspend_requested
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    assert not suspend_requested()
"""
        await engine.launch(s.gang(handler + LOOP))
        await s.reports(2)
        await engine.suspend(s.task, 1, 1000.0)
        events, end = await s.ended(engine)
        assert (end.outcome, end.reason) == ("suspended", "")
        assert s.exits(events) == {0: (0, None), 1: (0, None)}

    stage.play(scene)


def test_a_task_that_returns_before_the_agreed_call_has_finished(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = """
            from fireflyer.hai import suspend_requested
            assert not suspend_requested()
            report("asked")
            await_gate()
        """
        await engine.launch(s.gang(script))
        await s.reports(2)
        await engine.suspend(s.task, 1, 1000.0)
        s.open_gate(2)
        _, end = await s.ended(engine)
        assert end.outcome == "finished"

    stage.play(scene)


def test_a_failure_on_the_way_out_is_suspended_and_told(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = LOOP.replace("suspended()\n", "forever() if RANK == 0 else sys.exit(9)\n")
        gang = s.gang(script)
        await engine.launch(gang)
        await s.reports(2)
        await engine.suspend(s.task, 1, 1000.0)
        events, end = await s.ended(engine)
        assert end.outcome == "suspended"
        assert end.reason.startswith(f"rank 1 on {gang.nodes[1]} exited with status 9")
        assert s.exits(events) == {0: (None, signal.SIGKILL), 1: (9, None)}

    stage.play(scene)


def test_a_stop_overrides_a_suspend(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang("report('up')\nforever()"))
        await s.reports(2)
        await engine.suspend(s.task, 1, 1000.0)
        await engine.stop(s.task, 1, 1000.0)
        events, end = await s.ended(engine)
        assert end.outcome == "stopped"
        assert s.exits(events) == {0: (None, signal.SIGTERM), 1: (None, signal.SIGTERM)}

    stage.play(scene)


def test_a_suspend_that_overtakes_the_start(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang(LOOP))
        await engine.suspend(s.task, 1, 1000.0)
        _, end = await s.ended(engine)
        assert end.outcome == "suspended"

    stage.play(scene)
