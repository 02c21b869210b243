"""Nobody reads what is still under way: works that end as late as they can change no bit of the outcome."""

import io
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import: once here, not in each forked rank
import torch.distributed as dist
from tests.haiscale.sharding.test_fsdp import BLOCKS, Model, data, init, loss_of
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecisionPolicy

from fireflyer import hfreduce
from fireflyer.haiscale.fsdp import FullyShardedDataParallel, hybrid_mesh
from fireflyer.haiscale.gradients.deferred_shard import DeferredShard
from fireflyer.haiscale.sharding import communication

STEPS = 3


class Late(dist.Work):
    """Over when somebody waits, and not a moment before; until then the output is rubbish."""

    def __init__(self, work: dist.Work, output: torch.Tensor, arrived: torch.Tensor) -> None:
        super().__init__()
        self._work, self._output, self._arrived = work, output, arrived
        self._waited = False
        output.fill_(float("nan") if output.is_floating_point() else 0)

    def is_completed(self) -> bool:
        return self._waited

    def wait(self, timeout: Any = None) -> bool:
        if not self._waited:
            self._work.wait()
            self._output.copy_(self._arrived)
            self._waited = True
        return True


def late_reduce_scatter(output: torch.Tensor, source: torch.Tensor, *args: Any, **how: Any) -> Late:
    arrived = torch.empty_like(output)
    return Late(hfreduce.reduce_scatter(arrived, source, *args, **how), output, arrived)


def late_allreduce(tensor: torch.Tensor, *args: Any, **how: Any) -> Late:
    arrived = tensor.clone()
    return Late(hfreduce.allreduce(arrived, *args, **how), tensor, arrived)


def late_all_gather(output: torch.Tensor, source: torch.Tensor, *args: Any, **how: Any) -> Late:
    arrived = torch.empty_like(output)
    return Late(hfreduce.all_gather(arrived, source.clone(), *args, **how), output, arrived)


@contextmanager
def late(kinds: str) -> Iterator[list[str]]:
    """All works of these kinds come late; yields the names of those that came."""
    seen: list[str] = []

    def noted(name: str, call: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **how: Any) -> Any:
            seen.append(name)
            return call(*args, **how)

        return start if name in kinds else real

    mine = types.SimpleNamespace(**{name: getattr(hfreduce, name) for name in hfreduce.__all__})
    mine.reduce_scatter = noted("scatter", late_reduce_scatter, hfreduce.reduce_scatter)
    mine.allreduce = noted("allreduce", late_allreduce, hfreduce.allreduce)
    mine.all_gather = noted("gather", late_all_gather, hfreduce.all_gather)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communication, "hfreduce", mine)
        yield seen


Script = Callable[[FullyShardedDataParallel, torch.optim.Optimizer, Callable[[int], None]], None]


def plain(model: Any, optimizer: torch.optim.Optimizer, backward: Callable[[int], None]) -> None:
    for step in range(STEPS):
        backward(step)
        optimizer.step()
        optimizer.zero_grad()


def adding(model: Any, optimizer: torch.optim.Optimizer, backward: Callable[[int], None]) -> None:
    for step in range(STEPS):
        backward(2 * step)
        backward(2 * step + 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def no_sync(model: Any, optimizer: torch.optim.Optimizer, backward: Callable[[int], None]) -> None:
    for step in range(STEPS):
        with model.no_sync():
            backward(2 * step)
        backward(2 * step + 1)
        optimizer.step()
        optimizer.zero_grad()


def looking(model: Any, optimizer: torch.optim.Optimizer, backward: Callable[[int], None]) -> None:
    """Everything that looks at parameters, gradients and moments, between backward and the next step."""
    core = model.module
    looks: list[Callable[[], object]] = [
        lambda: [p.grad is None or p.grad.to_local().isfinite().all() for p in core.parameters()],
        lambda: [p.full_tensor() for p in core.parameters()],
        lambda: [p._local_tensor for p in core.parameters()],
        lambda: [repr(p) for p in core.parameters()],
        lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
        lambda: model.state_dict(full=True),
        lambda: nn.utils.get_total_norm([*core.parameters()]),
        lambda: torch._foreach_norm([p.detach() for p in core.parameters()]),
    ]
    for step, look in enumerate(looks):
        backward(step)
        if step % 2 == 0:
            look()
        optimizer.step()
        if step % 2 == 1:
            look()
        finite(look())
        optimizer.zero_grad()


def finite(found: Any) -> None:
    items = found.values() if isinstance(found, dict) else found
    for item in items if isinstance(found, dict | list | tuple) else ():
        if isinstance(item, torch.Tensor) and item.ndim:
            assert bool(torch.isfinite(getattr(item, "_local_tensor", item)).all())


def evaluating(
    model: Any, optimizer: torch.optim.Optimizer, backward: Callable[[int], None]
) -> None:
    for step in range(STEPS):
        backward(step)
        with torch.no_grad():
            loss_of(model, data(step))
        optimizer.step()
        with torch.no_grad():
            assert bool(torch.isfinite(loss_of(model, data(step))))
        optimizer.zero_grad()
        with model.summon_full_params(model), torch.no_grad():
            model.module.words.weight.mul_(1.001)


def clipping(model: Any, optimizer: torch.optim.Optimizer, backward: Callable[[int], None]) -> None:
    for step in range(STEPS):
        backward(step)
        assert float(model.clip_grad_norm_(0.01)) > 0.01
        optimizer.step()
        optimizer.zero_grad()


def skipping(model: Any, optimizer: torch.optim.Optimizer, backward: Callable[[int], None]) -> None:
    """Steps that are left out, and one that is asked for twice."""
    for step in range(STEPS):
        backward(step)
        if step % 2:
            optimizer.zero_grad()
            continue
        optimizer.step()
        if step == 2:
            optimizer.step()
        optimizer.zero_grad()


def hooked(model: Any, optimizer: torch.optim.Optimizer, backward: Callable[[int], None]) -> None:
    """Gradients are used by hooks, as soon as they are there."""

    def use(parameter: torch.Tensor) -> None:
        grad: Any = parameter.grad
        with torch.no_grad():
            parameter.sub_(0.01 * grad)
        parameter.grad = None

    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(use)
    for step in range(STEPS):
        backward(step)


CASES: dict[str, tuple[Script, dict[str, Any]]] = {
    "zero-3": (plain, {}),
    "zero-2": (plain, {"reshard_after_forward": False}),
    "prefetch after": (plain, {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "backlog": 1}),
    "one unit": (plain, {"auto_wrap_policy": None}),
    "offload": (plain, {"cpu_offload": True}),
    "low precision": (plain, {"mixed_precision": MixedPrecisionPolicy(torch.bfloat16)}),
    "narrow": (plain, {"gather_dtype": torch.bfloat16, "wire": "bf16"}),
    "adding": (adding, {}),
    "no_sync": (no_sync, {}),
    "looking": (looking, {}),
    "evaluating": (evaluating, {"reshard_after_forward": False}),
    "clipping": (clipping, {}),
    "skipping": (skipping, {}),
    "hooked": (hooked, {}),
}


def run(rank: int, world: int, name: str, defers: bool, **more: Any) -> list[torch.Tensor]:
    script, options = CASES[name]
    make = partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=True)
    model = FullyShardedDataParallel(
        Model(rank),
        optimizer=make if defers else None,
        **{"auto_wrap_policy": BLOCKS, **options, **more},
    )
    optimizer = model.optimizer or make([*model.parameters()])

    def backward(step: int) -> None:
        loss_of(model, data(step)[rank::world]).backward()
        crosses = defers and any(isinstance(p, DeferredShard) for p in model.parameters())
        assert crosses == (defers and model._units[0].group.reduce_grads)

    script(model, optimizer, backward)
    return [t.clone() for t in model.state_dict(full=True).values()]


@pytest.mark.sample(1, 6)
@pytest.mark.parametrize("name", CASES)
def test_late_works_change_no_bit(
    start_gang: Callable[..., Any], store_path: str, name: str
) -> None:
    def body(rank: int, world: int) -> bool:
        init(store_path, rank, world)
        for defers in (False, True):
            expected = run(rank, world, name, defers)
            with late("scatter gather allreduce") as seen:
                found = run(rank, world, name, defers)
            assert set(seen) == {"scatter", "gather", "allreduce"}
            assert all(map(torch.equal, found, expected)), f"deferred: {defers}"
            assert bool(torch.isfinite(torch.cat([t.flatten() for t in found])).all())
        return True

    assert start_gang(body, 2).results() == [True, True]


@pytest.mark.full
@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("defers", [False, True], ids=["synchronous", "deferred"])
def test_late_works_between_replicas(
    start_gang: Callable[..., Any], store_path: str, defers: bool
) -> None:
    def body(rank: int, world: int) -> bool:
        init(store_path, rank, world)
        mesh = hybrid_mesh()
        for name in ("zero-3", "adding", "no_sync", "hooked"):
            expected = run(rank, world, name, defers, mesh=mesh)
            with late("scatter gather allreduce") as seen:
                found = run(rank, world, name, defers, mesh=mesh)
            assert set(seen) == {"scatter", "gather", "allreduce"}
            assert all(map(torch.equal, found, expected)), name
        return True

    assert start_gang(body, 4, 2).results() == [True] * 4


def test_the_delay_is_noticed_where_nobody_waits(
    start_gang: Callable[..., Any], store_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test itself: without the wait for what is read at once, the outcome is rubbish."""
    from fireflyer.haiscale.sharding.gradients import Sharding

    monkeypatch.setattr(Sharding, "_reads_at_once", staticmethod(lambda *_: False))

    def body(rank: int, world: int) -> bool:
        init(store_path, rank, world)
        with late("scatter"):
            found = run(rank, world, "adding", defers=False)
        return bool(torch.isfinite(torch.cat([t.flatten() for t in found])).all())

    assert start_gang(body, 2).results() == [False, False]
