"""Wherever the look comes from that makes a deferred step happen, the step is that of a script's top."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adafactor, AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.fsdp import FullyShardedDataParallel
from fireflyer.haiscale.gradients.deferred import CLASSES
from fireflyer.haiscale.torch_state import isolated_torch_state

ROUNDS = 2
pytestmark = pytest.mark.filterwarnings("ignore:`?torch.jit:DeprecationWarning")


def init(path: str, rank: int, world: int) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("seen")


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("seen")


def within(context: contextlib.AbstractContextManager[Any]) -> Callable[..., None]:
    def run(look: Callable[[], None]) -> None:
        with context:
            look()

    return run


def traced(look: Callable[[], None]) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        look()
        return x + 1

    assert "aten::add_" not in str(torch.jit.trace(forward, torch.ones(2)).graph)


def compiled(look: Callable[[], None]) -> None:
    def backend(graph: Any, _: Any) -> Any:
        assert torch.compiler.is_compiling()
        look()
        return graph.forward

    try:
        torch.compile(torch.sin, backend=backend)(torch.ones(2))
    finally:
        torch._dynamo.reset()


def transformed(transform: Callable[..., Any]) -> Callable[..., None]:
    def run(look: Callable[[], None]) -> None:
        def inside(x: torch.Tensor) -> torch.Tensor:
            look()
            return x.sum()

        transform(inside)(torch.ones(2))

    return run


PLACES: dict[str, Callable[[Callable[[], None]], None]] = {
    "top": lambda look: look(),
    "no_grad": within(torch.no_grad()),
    "inference": within(torch.inference_mode()),
    "autocast": within(torch.autocast("cpu", torch.bfloat16)),
    "functions": within(Functions()),
    "dispatch": within(Dispatched()),  # type: ignore[no-untyped-call]
    "meta": within(torch.device("meta")),
    "vmap": transformed(torch.vmap),
    "jacrev": transformed(torch.func.jacrev),
    "jacfwd": transformed(torch.func.jacfwd),
    "trace": traced,
    "compile": compiled,
}


def like_an_optimizer() -> None:
    assert not torch.compiler.is_compiling()
    weight = torch.tensor([[1.5, 1.0], [1.0, 1.0]])
    weight.add_(weight)
    assert not weight.is_inference()
    assert weight.numpy().tolist() == [[3.0, 2.0], [2.0, 2.0]]
    assert (weight @ weight).dtype == torch.float32
    assert weight.requires_grad_().sum().requires_grad


@pytest.mark.parametrize("place", PLACES)
def test_at_rest(place: str) -> None:
    outside = []

    def state() -> tuple[object, ...]:
        keys: Any = torch._C
        return (
            keys._dispatch_tls_local_include_set().raw_repr(),
            keys._dispatch_tls_local_exclude_set().raw_repr(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            keys._len_torch_function_stack(),
            keys._len_torch_dispatch_stack(),
            keys._get_tracing_state() is None,
        )

    def look() -> None:
        before = state()
        with isolated_torch_state():
            like_an_optimizer()
        assert state() == before
        with contextlib.suppress(ZeroDivisionError), isolated_torch_state():
            raise ZeroDivisionError
        assert state() == before
        outside.append(before)

    PLACES[place](look)
    assert outside


def test_the_default_device_stays() -> None:
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"), isolated_torch_state():
            assert torch.ones(1).is_meta
        with isolated_torch_state():
            assert torch.ones(1).is_meta
        assert torch.ones(1).is_meta
    finally:
        torch.set_default_device(None)
    with isolated_torch_state():
        assert not torch.ones(1).is_meta


def save_products(_context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Net(nn.Module):
    def __init__(self, selective: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
        self.outer = nn.Linear(8, 8, bias=False)
        self.selective = selective

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.selective or not torch.is_grad_enabled():
            y: torch.Tensor = self.outer(self.inner(x))
            return y
        contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
        y = checkpoint(self._both, x, use_reentrant=False, context_fn=contexts)
        return y

    def _both(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.outer(self.inner(x)))


X = torch.linspace(-1, 1, 32).view(4, 8)


def places(net: Net) -> Iterator[None]:
    """Looks at parameters in one place after another; between them a step is asked for."""
    trace = functools.partial(torch.jit.trace, example_inputs=(X,))
    with torch.inference_mode():
        net(X)
    yield
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        net(X)
    yield
    with FlopCounterMode(display=False) as counter:
        net.outer(X)
    assert counter.get_total_flops() == 2 * 4 * 8 * 8
    yield
    if not net.selective:
        torch.func.jacrev(net)(X[0])
        yield
        torch.vmap(net)(X)
        yield
        torch.func.jvp(net, (X,), (X,))
        yield
        trace(net)
        yield


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": functools.partial(AdamW, lr=0.05),
    "adafactor": functools.partial(Adafactor, lr=0.05),
    "muon": functools.partial(Muon, lr=0.05),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_deferred_equals_synchronous(
    start_gang: Callable[..., Any], store_path: str, kind: str, selective: bool
) -> None:
    def train(rank: int, defers: bool) -> list[torch.Tensor]:
        net = Net(selective)
        optimizer = OPTIMIZERS[kind](net.parameters())
        model = DistributedDataParallel(net, optimizer=optimizer if defers else None)
        for _ in range(ROUNDS):
            looks = places(net)
            for _ in looks:
                optimizer.zero_grad()
                (model(X + rank) ** 2).mean().backward()
                optimizer.step()
                assert not defers or {type(p) for p in net.parameters()} < {*CLASSES.values()}
        return [p.detach().clone() for p in net.parameters()]

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        pairs = zip(train(rank, defers=False), train(rank, defers=True), strict=True)
        return [torch.equal(a, b) for a, b in pairs]

    assert start_gang(body, 2).results() == [[True, True]] * 2


@pytest.mark.usefixtures("compiler")
def test_compiled_code(start_gang: Callable[..., Any], store_path: str) -> None:
    """In a sharded model, around it, or of the same module apart from a replicated one: its parameters have
    arrived. Guards on them hold, where the wrapper is called."""

    def sharded(inside: bool = False, outside: bool = False) -> list[torch.Tensor]:
        net: Any = Net(selective=False).double()
        if inside:
            net.inner = torch.compile(net.inner, backend="eager")
        wrapped = FullyShardedDataParallel(net, optimizer=functools.partial(AdamW, lr=0.05))
        assert wrapped.optimizer is not None
        model: Any = torch.compile(wrapped, backend="eager") if outside else wrapped
        for step in range(4):
            wrapped.optimizer.zero_grad()
            (model(X.double() + step) ** 2).mean().backward()
            wrapped.optimizer.step()
        return [*wrapped.state_dict(full=True).values()]

    def apart(defers: bool) -> list[torch.Tensor]:
        net = Net(selective=False).double()
        optimizer = AdamW(net.parameters(), lr=0.05)
        model = DistributedDataParallel(net, optimizer=optimizer if defers else None)
        read = torch.compile(net, backend="eager")
        values: list[torch.Tensor] = []
        for step in range(4):
            optimizer.zero_grad()
            (model(X.double() + step) ** 2).mean().backward()
            optimizer.step()
            with torch.no_grad():
                values.append(read(X.double()))
        return [*values, *net.parameters()]

    def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        torch._dynamo.config.recompile_limit = 4
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        expected = sharded()
        both = equal(sharded(inside=True), expected), equal(sharded(outside=True), expected)
        return *both, equal(apart(defers=True), apart(defers=False))

    assert start_gang(body, 2).results() == [(True, True, True)] * 2
