"""Checkpoints in memory under the platform: a gang loses a node, and goes on from what no storage has."""

import os
import signal
from typing import Any

import pytest

from fireflyer.hai.forkserver import DEFAULT_PRELOAD

Stage = Any

TRAIN = """
    import threading
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from fireflyer.checkpoint import CheckpointManager, Shard
    from fireflyer.storage import DirectoryStorage

    class Stuck(DirectoryStorage):
        def write(self, name, chunks):
            if name.startswith("step-000000000020/"):
                threading.Event().wait()
            super().write(name, chunks)

    def state_of(step):
        rows = torch.randn(2, 30000, generator=torch.Generator().manual_seed(step))
        return {"sharded": Shard(rows[RANK : RANK + 1].contiguous(), (2, 30000), (RANK, 0)), "step": step}

    def same(state, step):
        return torch.equal(state["sharded"].local, state_of(step)["sharded"].local)

    dist.init_process_group("gloo")
    manager = CheckpointManager(Stuck(Path("checkpoints")), memory=True)
    if manager.latest() is None:
        manager.save(10, state_of(10)).wait()
        report(20, manager.save(20, state_of(20)).wait_in_memory(), manager.latest(), os.getpid())
        forever()
    state = manager.load(into=state_of(1))
    report(state["step"], same(state, state["step"]), os.path.exists("checkpoints/damaged"))
    handle = manager.save(30, state_of(30))
    handle.wait()
    report(handle.in_memory, *manager.steps())
    dist.destroy_process_group()
"""


@pytest.mark.sample(1, 2)
@pytest.mark.full
@pytest.mark.parametrize("loss", ["n0", "n1", "a rank"])
def test_a_gang_that_loses_a_node_goes_on_from_memory(stage: Stage, loss: str) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(2, preload=DEFAULT_PRELOAD)
        script = s.script(TRAIN)
        await engine.launch(s.gang(script))
        pids = {}
        for rank, *words, pid in await s.reports(2):
            assert words == ["20", "True", "10"]
            pids[rank] = int(pid)
        keepers = {pid for pid, line in s.processes().items() if "checkpoint.memory.keeper" in line}
        assert len(keepers) == 2
        if loss == "a rank":
            os.kill(pids["1"], signal.SIGKILL)
        else:
            os.kill(s.guard(loss), signal.SIGKILL)
        await s.ended(engine)
        left = {pid for pid, line in s.processes().items() if "checkpoint.memory.keeper" in line}
        assert len(left & keepers) == (2 if loss == "a rank" else 1)

        await engine.launch(s.gang(script, attempt=2))
        assert sorted(words[1:] for words in await s.reports(2)) == [["20", "True", "False"]] * 2
        assert sorted(words[1:] for words in await s.reports(2)) == [["True", "10", "30"]] * 2
        await s.ended(engine)
        assert not list((s.folder / "checkpoints").glob("step-000000000020/manifest-*"))

    stage.play(scene)
