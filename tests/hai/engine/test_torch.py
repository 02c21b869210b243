"""The default preload: torch ranks forked from a warm server, over a kill and a suspend."""

import os
import signal
from typing import Any

from fireflyer.hai.forkserver import DEFAULT_PRELOAD

Stage = Any

TRAIN = """
    warm = [m for m in MODULES if m in sys.modules]
    import torch
    import torch.distributed as dist
    from fireflyer.hai import suspend_requested, suspended
    dist.init_process_group("gloo")
    weight = torch.ones(256, 256, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    first = True
    while True:
        (weight @ weight).sum().backward()
        dist.all_reduce(weight.grad)
        optimizer.step()
        if first:
            report(len(warm), os.getpid())
            first = False
        if suspend_requested():
            suspended()
"""


def test_torch_ranks_train_through_a_kill_and_a_suspend(stage: Stage) -> None:
    async def scene(s: Stage) -> None:
        engine = s.engine(1, preload=DEFAULT_PRELOAD)
        script = s.script(TRAIN.replace("MODULES", repr(DEFAULT_PRELOAD)))
        await engine.launch(s.gang(script, nodes=1, ranks=2))
        pids = {}
        for rank, warm, pid in await s.reports(2):
            assert int(warm) == len(DEFAULT_PRELOAD)
            pids[int(rank)] = int(pid)
        server = s.fork_server("n0")
        os.kill(pids[1], signal.SIGKILL)
        _, end = await s.ended(engine)
        assert end.reason == f"rank 1 on n0 was killed by SIGKILL (pid {pids[1]})"

        await engine.launch(s.gang(script, nodes=1, ranks=2, attempt=2))
        await s.reports(2)
        assert s.fork_server("n0") == server
        await engine.suspend(s.task, 2, 1000.0)
        events, end = await s.ended(engine)
        assert (end.outcome, end.reason) == ("suspended", ""), s.log(0, 2) + s.log(1, 2)
        assert s.exits(events) == {0: (0, None), 1: (0, None)}

    stage.play(scene)
