"""Suspend: one call number for all ranks, whatever their speed; nothing waits for a rank's progress."""

import asyncio
import os
import signal
from typing import Any

from fireflyer._native.hai import SuspendPage
from fireflyer.hai.supervisor.messages import Freeze

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
