"""An attempt that the platform ends as failed: what its ranks were at is written, then nothing is left."""

from pathlib import Path

import pytest
from tests.hai.engine.conftest import Stage

from fireflyer import heartbeat
from fireflyer.hai.model.engine import NodeObserved
from fireflyer.hai.model.observations import Network, OutOfMemory

SCRIPT = """
    from fireflyer import hai
    def stuck_here():
        report("up", os.getpid())
        forever()
    hai.heartbeat(3)
    stuck_here()
"""


def stacks(s: Stage, rank: int) -> str:
    return (s.folder / s.task / "1" / f"{rank}.stacks").read_text()


@pytest.mark.sample(2)
@pytest.mark.parametrize("start", ["fork", "exec"])
def test_a_hung_gang_is_failed_with_its_stacks_saved(stage: Stage, start: str) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        gang = s.gang(SCRIPT, start="fork" if start == "fork" else "exec")
        await engine.launch(gang)
        pids = {int(w[0]): int(w[2]) for w in await s.reports(2)}
        await engine.fail(s.task, 1, "hung: nothing for 9 s")
        await engine.fail(s.task, 1, "said again")
        _, end = await s.ended(engine)
        assert (end.outcome, end.reason, end.lost) == ("failed", "hung: nothing for 9 s", ())
        for rank in (0, 1):
            assert "in stuck_here" in stacks(s, rank)
            assert f"process {pids[rank]}\n  thread {pids[rank]} " in stacks(s, rank)
            told = heartbeat.read(gang.directory / f"{rank}.pulse")
            assert told is not None
            assert told.step == 3
        assert not any(s.alive(pid) for pid in pids.values())

    stage.play(scene)


def test_a_rank_that_knows_nothing_of_us_is_not_killed_by_the_question(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        gang = s.gang("report('up', os.getpid())\nforever()", start="exec")
        await engine.launch(gang)
        pids = {int(w[0]): int(w[2]) for w in await s.reports(2)}
        await engine.fail(s.task, 1, "hung")
        events, end = await s.ended(engine)
        assert (end.outcome, end.reason) == ("failed", "hung")
        assert set(s.exits(events).values()) == {(None, 9)}
        for rank in (0, 1):
            assert f"thread {pids[rank]} " in stacks(s, rank)

    stage.play(scene)


def test_a_gang_that_is_over_cannot_be_failed(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine()
        await engine.launch(s.gang(""))
        _, end = await s.ended(engine)
        assert end.outcome == "finished"
        await engine.fail(s.task, 1, "late")
        await engine.fail("t0", 1, "of nobody")

    stage.play(scene)


def test_what_the_kernel_says_is_told_with_its_node_and_rank(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "kernel.log"
    log.write_bytes(b"mlx5_core 0000:5e:00.0 ib9: Link down\n")
    monkeypatch.setenv("FIREFLYER_KERNEL_LOG", str(log))

    async def scene(s: Stage) -> None:
        engine = s.engine()
        gang = s.gang("report('up', os.getpid())\nforever()", nodes=1)
        await engine.launch(gang)
        ((_, _, pid),) = await s.reports(1)
        with log.open("a") as file:
            file.write("usb 1-1: new device\n")
            file.write("mlx5_core 0000:5e:00.0 ib0: Link down\n")
            file.write("Memory cgroup out of memory: Killed process 1 (of another task)\n")
            file.write(f"Out of memory: Killed process {pid} (python)\n")
            file.write(f"Memory cgroup out of memory: Killed process {pid} (python)\n")

        def limited(event: object) -> bool:
            found = event.observation if isinstance(event, NodeObserved) else None
            return isinstance(found, OutOfMemory) and found.limited

        told = await s.until(engine, limited)
        flap, oom, limit = (e.observation for e in told if isinstance(e, NodeObserved))
        node = gang.nodes[0]
        assert isinstance(flap, Network)
        assert (flap.node, flap.device, flap.state) == (node, "ib0", "down")
        assert isinstance(oom, OutOfMemory)
        assert (oom.node, oom.rank, oom.pid, oom.limited) == (node, 0, int(pid), False)
        assert isinstance(limit, OutOfMemory)
        assert (limit.rank, limit.pid, limit.limit_mib) == (0, int(pid), 0)
        await engine.stop(s.task, 1, 0.0)
        await s.ended(engine)

    stage.play(scene)
