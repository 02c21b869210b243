"""Whom backward waits for while it makes gradients: alike on all ranks, whatever each has seen arrive.

Rank 0 settles which of the waiting reductions is next, the newest first. A rank that waited for another one
before it starts that newest would wait for ever.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.haiscale.sharding.test_fsdp import BLOCKS, OPTIMIZERS, Model, data, init, loss_of

from fireflyer.haiscale.fsdp import FullyShardedDataParallel
from fireflyer.haiscale.sharding.gradients import ShardReduction

STEPS = 3


@pytest.mark.parametrize("backlog", [1, 2, 4])
def test_all_ranks_wait_for_the_same(
    start_gang: Callable[..., Any], store_path: str, monkeypatch: pytest.MonkeyPatch, backlog: int
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        model = FullyShardedDataParallel(
            Model(), optimizer=OPTIMIZERS["sgd"], auto_wrap_policy=BLOCKS, backlog=backlog
        )
        assert model.optimizer is not None
        seen: list[tuple[str, int]] = []
        sharding: Any = model._sharding
        number = {id(unit): at for at, unit in enumerate(model._units)}
        awaits, scatters = sharding._await, sharding._channels.scatter

        def waiting(flight: ShardReduction) -> None:
            if sharding.in_backward:
                seen.append(("wait", number[id(flight._unit)]))
            awaits(flight)

        def starting(*args: Any) -> Any:
            seen.append(("start", 0))
            return scatters(*args)

        monkeypatch.setattr(sharding, "_await", waiting)
        monkeypatch.setattr(sharding._channels, "scatter", starting)
        if rank == 1:
            monkeypatch.setattr(ShardReduction, "over", lambda _: False)
        for step in range(STEPS):
            model.optimizer.zero_grad()
            loss_of(model, data(step)[rank::world]).backward()
            model.optimizer.step()
        return seen, [t.sum().item() for t in model.state_dict(full=True).values()]

    (first, values), (second, others) = start_gang(body, 2, 2).results()
    assert first == second
    waits = sum(what == "wait" for what, _ in first)
    units = 4  # three blocks and the outermost
    assert waits == STEPS * max(0, units - backlog)
    assert values == others
    assert all(torch.isfinite(torch.tensor(values)))
