"""Suspend: one call number for all ranks, whatever their speed; nothing waits for a rank's progress."""

import asyncio
import os
import signal
from typing import Any

from fireflyer._native.hai import SuspendPage
from fireflyer.hai.engines.messages import Freeze

Stage = Any

LOOP = """
    from fireflyer.hai import suspend_requested, suspended
    report("up")
    calls = 1
    while not suspend_requested():
        calls += 1
        {step}
    report("told", calls)
    suspended()
"""

# An exchange of one byte with every other rank through rank 0, as a collective would: nobody runs ahead.
COLLECTIVE = """
    port = int(os.environ["MASTER_PORT"])
    others = int(os.environ["WORLD_SIZE"]) - 1
    if RANK == 0:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(16)
        report("listening")
        peers = [listener.accept()[0] for _ in range(others)]
    else:
        await_gate()
        peers = [socket.create_connection(("127.0.0.1", port))]
    def exchange():
        for peer in peers if RANK == 0 else ():
            assert peer.recv(1) == b"x"
        for peer in peers:
            peer.sendall(b"x")
        if RANK != 0:
            assert peers[0].recv(1) == b"x"
"""


def told(reports: list[list[str]]) -> set[str]:
    assert {words[1] for words in reports} == {"told"}
    assert len({words[0] for words in reports}) == len(reports)
    return {words[2] for words in reports}


def test_free_running_ranks_are_told_at_the_same_call(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = LOOP.format(step="time.sleep(0.0002 * (1 + 3 * RANK))")
        await engine.launch(s.gang(script, ranks=2))
        await s.reports(4)
        await engine.suspend(s.task, 1, 1000.0)
        assert len(told(await s.reports(4))) == 1
        events, end = await s.ended(engine)
        assert (end.outcome, end.reason) == ("suspended", "")
        exits = [e for e in events if hasattr(e, "suspended")]
        assert [(e.code, e.suspended) for e in exits] == [(0, True)] * 4

    stage.play(scene)


def test_ranks_in_collectives_leave_without_deadlock_again_and_again(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = s.script(COLLECTIVE + LOOP.format(step="exchange()"))
        for attempt in range(1, 6):
            await engine.launch(s.gang(script, ranks=2, attempt=attempt))
            assert await s.reports(1) == [["0", "listening"]]
            s.open_gate(3)
            await s.reports(4)
            await engine.suspend(s.task, attempt, 1000.0)
            assert len(told(await s.reports(4))) == 1
            _, end = await s.ended(engine)
            assert (end.attempt, end.outcome) == (attempt, "suspended")

    stage.play(scene)


def test_a_suspend_before_the_first_call_is_answered_at_call_1(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = "    report('here')\n    await_gate()\n" + LOOP.format(step="pass")
        await engine.launch(s.gang(script))
        await s.reports(2)
        await engine.suspend(s.task, 1, 1000.0)
        await engine.suspend(s.task, 1, 1000.0)
        s.open_gate(2)
        words = await s.reports(4)
        assert told([w for w in words if w[1] == "told"]) == {"1"}
        _, end = await s.ended(engine)
        assert end.outcome == "suspended"

    stage.play(scene)


def test_a_rank_that_never_asks_is_ended_after_the_grace(stage: Stage) -> None:
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


def test_a_task_that_ends_before_the_agreed_call_has_finished(stage: Stage) -> None:
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


def test_a_rank_told_that_returns_without_a_word_is_suspended(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = LOOP.format(step="pass").replace("suspended()\n", "sys.exit(0)\n")
        await engine.launch(s.gang(script))
        await s.reports(2)
        await engine.suspend(s.task, 1, 1000.0)
        events, end = await s.ended(engine)
        assert end.outcome == "suspended"
        assert [e.suspended for e in events if hasattr(e, "suspended")] == [False, False]

    stage.play(scene)


def test_a_failure_while_leaving_ends_the_others_and_is_told(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        script = LOOP.format(step="pass").replace(
            "suspended()\n", "forever() if RANK == 0 else sys.exit(9)\n"
        )
        await engine.launch(s.gang(script))
        await s.reports(2)
        await engine.suspend(s.task, 1, 1000.0)
        events, end = await s.ended(engine)
        assert end.outcome == "suspended"
        assert end.reason.startswith("rank 1 on n1 exited with status 9")
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


def test_a_call_that_waits_still_takes_signals(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1)
        script = """
            from fireflyer.hai import suspend_requested
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
            report(os.getpid(), os.environ["FIREFLYER_CONTROL"])
            await_gate()
            suspend_requested()
        """
        await engine.launch(s.gang(script, nodes=1))
        ((_, pid, control),) = await s.reports(1)
        s.ask("n0", Freeze(attempt=1, grace_s=1000.0))  # and no second phase
        slot, _, path = control.partition(":")
        with open(path, "r+b") as file:
            page = SuspendPage.map(file.fileno())
        s.open_gate(1)
        while page.count(int(slot)) == 0 or s.state(int(pid)) != "S":
            await asyncio.sleep(0)
        os.kill(int(pid), signal.SIGTERM)
        events, end = await s.ended(engine)
        assert s.exits(events) == {0: (3, None)}
        assert end.outcome == "suspended"

    stage.play(scene)


def test_loss_of_a_node_between_the_phases_ends_the_gang(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang(LOOP.format(step="time.sleep(0.001)")))
        await s.reports(2)
        os.kill(s.supervisor("n1"), signal.SIGSTOP)  # answers no freeze
        suspend = asyncio.create_task(engine.suspend(s.task, 1, 1000.0))
        await asyncio.sleep(0)
        os.kill(s.supervisor("n1"), signal.SIGKILL)
        await suspend
        _, end = await s.ended(engine)
        assert end.outcome == "lost"

    stage.play(scene)
