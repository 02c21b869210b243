"""Hooks in real torch loops, on a clock that only the script's phases move: times are exact."""

import copy
import inspect
import io
import pickle
import socket
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.haiprof.clockwork import Clock, Data, Hooks, Model, Slow, hooked, in_ms
from torch import nn

from fireflyer._native.haiprof import Timed
from fireflyer.haiprof.events import COMMUNICATION
from fireflyer.haiprof.inside import agent, points
from fireflyer.haiprof.inside import buffer as buffers
from fireflyer.haiprof.inside.buffer import EventBuffer
from fireflyer.haiprof.inside.modules import SEARCH_EVERY, RootModules
from fireflyer.haiprof.messages import Request


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(buffers, "CLOCK", found)
    return found


def loop(clock: Clock, model: Callable[..., Any], optimizer: Any, steps: int) -> None:
    loader = torch.utils.data.DataLoader(Data(clock, 3), batch_size=2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for _, batch in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        loss = model(batch).sum()
        clock.work(1)  # the loss
        loss.backward()
        clock.work(2)  # clipping
        optimizer.step()
        schedule.step()
        clock.work(4)  # logging


EXACT = {"data": 6, "forward": 21, "backward": 40, "optimizer": 9, "other": 4}


def test_a_plain_loop_is_measured_exactly(clock: Clock) -> None:
    model = Model(clock)
    with hooked() as hooks:
        loop(clock, model, Slow(model, clock, 7), 8)
        rows = hooks.rows()
    assert [in_ms(row) for row in rows] == [EXACT] * 7
    assert not hooks.roots.modules or hooks.roots.modules == [model]  # not its inner module


def test_hooks_that_come_into_a_running_loop_see_all_later_steps(clock: Clock) -> None:
    model = Model(clock)
    optimizer = Slow(model, clock, 7)
    loader = iter(torch.utils.data.DataLoader(Data(clock, 3), batch_size=2))

    def step() -> None:
        loss = model(next(loader)).sum()
        loss.backward()
        optimizer.step()

    step()
    with hooked() as hooks:
        for _ in range(5):
            step()
        rows = hooks.rows()
    assert [in_ms(r) for r in rows] == [
        {"data": 6, "forward": 20, "backward": 40, "optimizer": 7}
    ] * 4


def test_accumulation_and_a_loss_module(clock: Clock) -> None:
    model, loss = Model(clock), Model(clock, 5, 1)
    optimizer = Slow(model, clock, 7)
    with hooked() as hooks:
        for _ in range(4):
            for _ in range(3):
                loss(model(torch.ones(2, 2))).sum().backward()
            optimizer.step()
        rows = hooks.rows()
    assert [in_ms(row) for row in rows] == [{"forward": 75, "backward": 123, "optimizer": 7}] * 3


def test_a_gan_makes_one_step_of_two_optimizers(clock: Clock) -> None:
    generator, critic = Model(clock, 10, 11), Model(clock, 3, 4)
    first, second = Slow(critic, clock, 1), Slow(generator, clock, 2)
    with hooked() as hooks:
        for _ in range(5):
            critic(generator(torch.ones(2, 2)).detach()).sum().backward()
            first.step()
            critic(generator(torch.ones(2, 2))).sum().backward()
            second.step()
        rows = hooks.rows()
    assert [in_ms(row) for row in rows] == [{"forward": 26, "backward": 19, "optimizer": 3}] * 4


def test_a_closure_and_recomputation(clock: Clock) -> None:
    from torch.utils.checkpoint import checkpoint

    model = Model(clock)
    optimizer = Slow(model, clock, 7)

    def closure() -> float:
        loss = checkpoint(model, torch.ones(2, 2, requires_grad=True), use_reentrant=True).sum()
        loss.backward()
        return 0.0

    with hooked() as hooks:
        for _ in range(4):
            optimizer.step(closure)
        rows = hooks.rows()
    assert [in_ms(row) for row in rows] == [{"forward": 20, "backward": 60, "optimizer": 7}] * 3


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_module_is_one_root_and_is_not_compiled_again(
    clock: Clock, in_place: bool
) -> None:
    compilations = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return graph.forward

    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    compiled: Any
    if in_place:
        inner.compile(backend=backend)
        compiled = inner
    else:
        compiled = torch.compile(inner, backend=backend)
    optimizer = Slow(inner, clock, 7)

    def step() -> None:
        compiled(torch.ones(2, 2)).sum().backward()
        clock.work(5)
        optimizer.step()

    step()
    before = compilations
    with hooked() as hooks:
        for _ in range(5):
            step()
        assert len(hooks.rows()) == 4
        assert hooks.roots.modules == [compiled]
    step()
    assert compilations == before
    with hooked():  # a module that is compiled during a session
        torch.compile(nn.Sequential(nn.Linear(2, 1)), backend=backend)(torch.ones(2, 2))
    assert compilations == before + 1


def everything() -> list[Any]:
    found = [nn.Module.__call__]
    places = [at for point in points.POINTS if (at := points.owner_of(point))]
    found += [vars(owner).get(name) for owner, name in places]
    optimizers = sys.modules["torch.optim.optimizer"]
    found += [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    return found


def is_hooked(model: nn.Module) -> bool:
    return type(model)._compiled_call_impl is not None


def test_everything_is_as_it_was_afterwards(clock: Clock) -> None:
    model = Model(clock)
    before = everything()
    with hooked():
        loop(clock, model, Slow(model, clock, 7), 3)
        assert any(a is not b for a, b in zip(before, everything(), strict=True))
        assert is_hooked(model)
    assert all(a is b for a, b in zip(before, everything(), strict=True))
    assert not is_hooked(model)
    assert not before[-1]


def test_a_session_that_ends_while_a_root_gets_its_hooks_leaves_none(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hooks, put = Model(clock), Hooks(), RootModules._put

    def late(roots: RootModules, module: Any) -> None:
        hooks.end()  # by the agent, between the decision and the act
        put(roots, module)

    monkeypatch.setattr(RootModules, "_put", late)
    model(torch.ones(2, 2))
    assert not hooks.buffer.active
    assert not is_hooked(model)


def test_hooks_of_others_survive(clock: Clock) -> None:
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    mine: list[int] = []
    first = optimizers.register_optimizer_step_post_hook(lambda *_: mine.append(1))
    model = Model(clock)
    with hooked():
        second = optimizers.register_optimizer_step_post_hook(lambda *_: mine.append(2))
        Slow(model, clock, 1).step()
    Slow(model, clock, 1).step()
    assert mine == [1, 2, 1, 2]
    first.remove()
    kept = optimizers._global_optimizer_post_hooks
    kept.pop(second.id)
    assert not kept


def test_a_function_that_was_wrapped_meanwhile_stays_wrapped(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    with monkeypatch.context() as patch:
        hooks = Hooks()
        ours = torch.load

        def load(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return ours(*args, **kwargs)

        patch.setattr(torch, "load", load)
        hooks.end()
        stored = io.BytesIO()
        torch.save({"x": 1}, stored)
        stored.seek(0)
        assert torch.load(stored) == {"x": 1}
    assert calls == [1]
    torch.load = sys.modules["torch.serialization"].load


def test_a_saved_module_has_no_hook_in_it(clock: Clock) -> None:
    model = nn.Linear(2, 2)
    with hooked() as hooks:
        for _ in range(3):
            model(torch.ones(2, 2))
        stored = io.BytesIO()
        torch.save(model, stored)
        assert b"haiprof" not in stored.getvalue()
        assert is_hooked(model)
        assert hooks.roots.modules == [model]


def test_copies_of_a_hooked_module_are_modules_of_their_own(clock: Clock) -> None:
    model = nn.Linear(2, 2)
    with hooked():
        for _ in range(3):
            model(torch.ones(2, 2))
        assert is_hooked(model)
        replica = nn.Linear(2, 2)
        replica.__dict__ = {**vars(model), "_parameters": vars(replica)["_parameters"]}
        x = torch.ones(2, 2)
        assert torch.equal(replica(x), nn.functional.linear(x, replica.weight, replica.bias))
        assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_a_module_that_is_hooked_compiles_whole(clock: Clock) -> None:
    class Hooked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    module = Hooked()
    with hooked():
        for _ in range(3):
            module(torch.ones(2))
        assert is_hooked(module)
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        outer = torch.compile(nn.Sequential(module, nn.ReLU()), backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(2)), outer(torch.ones(2)))


def test_scripted_traced_and_closed_modules_are_called_as_ever(clock: Clock) -> None:
    class Closed(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            raise TypeError("closed")

    class Root(nn.Linear, metaclass=Closed):
        pass

    closed, x = Root(2, 2), torch.ones(2, 2)
    with pytest.warns(DeprecationWarning, match=r"jit\.script"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    modules = [torch.fx.symbolic_trace(nn.Linear(2, 2)), scripted, closed]
    before = [module(x) for module in modules]
    with hooked() as hooks:
        for _ in range(3):
            assert all(torch.equal(m(x), y) for m, y in zip(modules, before, strict=True))
        assert hooks.roots.modules == modules
    assert all(torch.equal(m(x), y) for m, y in zip(modules, before, strict=True))


def test_a_hook_passes_for_its_function() -> None:
    def add(a: int, b: int = 2, *, c: int = 3) -> int:
        """Adds."""
        return a + b + c

    class Owner:
        method = points.timed(add, EventBuffer(), 1, "add")

    hook = vars(Owner)["method"]
    assert (hook.__name__, hook.__doc__, hook.__wrapped__) == ("add", "Adds.", add)
    assert inspect.signature(hook) == inspect.signature(add)
    hook.note = 7
    assert vars(add) == {"note": 7}
    with pytest.raises(TypeError, match="unexpected keyword argument 'd'"):
        hook(1, d=4)
    assert Owner.__dict__["method"].__get__(1, int)(c=4) == 7
    with hooked():
        assert isinstance(torch.save, Timed)
        assert pickle.loads(pickle.dumps(torch.save)) is copy.deepcopy(torch.save) is torch.save


def test_a_collective_that_cannot_be_noted_is_called_all_the_same() -> None:
    buffer = EventBuffer()
    buffer.active, buffer.collectives = True, []
    hook = points.timed(lambda *args: len(args), buffer, COMMUNICATION, "all_reduce")
    assert hook(torch.ones(3)) == 1
    assert [(name, size) for name, _, size, _ in buffer.collectives] == [("all_reduce", 12)]
    buffer.collectives = None
    assert hook(1, 2) == 2


def test_an_exception_in_forward_closes_the_phase(clock: Clock) -> None:
    class Failing(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 100:
                clock.work(5)
                raise ValueError("too large")
            return super().forward(x)

    model = Failing(clock)
    optimizer = Slow(model, clock, 7)
    with hooked() as hooks:
        for _ in range(5):
            with pytest.raises(ValueError, match="too large"):
                model(torch.full((2, 2), 1e3))
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        rows = hooks.rows()
    assert [in_ms(row) for row in rows] == [{"forward": 25, "backward": 40, "optimizer": 7}] * 4


def test_a_model_that_comes_late_is_found(clock: Clock) -> None:
    models = [Model(clock), Model(clock, 1, 2)]
    optimizer = Slow(models[0], clock, 7)
    with hooked() as hooks:
        for n in range(SEARCH_EVERY + 6):
            model = models[n > 10]
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        rows = hooks.rows()
        assert hooks.roots.modules == models
    assert in_ms(rows[-1]) == {"forward": 1, "backward": 2, "optimizer": 7}


def test_a_buffer_that_is_not_drained_stops_growing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "MOST_EVENTS", 10)
    buffer = EventBuffer()
    for _ in range(10):
        buffer.log.put(True, 1, 0)
        buffer.log.put(False, 1, 0)
    assert len(buffer.drain()[0]) == 8 * 10
    assert buffer.dropped == 10


def test_methods_that_callbacks_override_are_timed_and_restored(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TrainerCallback:
        def on_step_end(self) -> None:
            raise AssertionError("not overridden")

        def on_log(self) -> None:
            pass

    class CallbackHandler(TrainerCallback):
        def __init__(self, callbacks: list[TrainerCallback]) -> None:
            self.callbacks = callbacks

        def call_event(self) -> None:
            for callback in self.callbacks:
                callback.on_step_end()
                callback.on_log()
                clock.work(3)

        def on_step_end(self) -> None:
            self.call_event()

    class Reports(TrainerCallback):
        def on_step_end(self) -> None:
            clock.work(5)

    class More(Reports):
        def on_step_end(self) -> None:
            clock.work(1)
            super().on_step_end()

    module = ModuleType("transformers.trainer_callback")
    vars(module).update(TrainerCallback=TrainerCallback, CallbackHandler=CallbackHandler)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = [vars(owner).copy() for owner in (TrainerCallback, CallbackHandler, Reports, More)]
    model = Model(clock)
    optimizer = Slow(model, clock, 7)
    handler = CallbackHandler([Reports(), More()])
    with hooked() as hooks:
        for batch in torch.utils.data.DataLoader(Data(clock, 3, 10), batch_size=2):
            model(batch).sum().backward()
            optimizer.step()
            handler.on_step_end()
            clock.work(2)
        rows = hooks.rows()
    spent = {"data": 6, "forward": 20, "backward": 40, "optimizer": 7}
    spent |= {"callbacks": 11, "framework": 6, "other": 2}
    assert [in_ms(row) for row in rows] == [spent] * 4
    assert rows[0].callbacks == pytest.approx({"Reports": 0.010, "More": 0.001})
    classes = (TrainerCallback, CallbackHandler, Reports, More)
    assert [vars(owner) for owner in classes] == before


def test_modules_that_come_late_get_hooks_once_their_import_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Logger:
        pass

    class Mine(Logger):
        def log_metrics(self) -> None:
            pass

    original = vars(Mine)["log_metrics"]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        session = agent.Session(ours, Request(seconds=1), lambda: None)
        session._put_hooks()
        loading = ModuleType("safetensors.torch")
        vars(loading).update(save_file=copy.copy, __spec__=SimpleNamespace(_initializing=True))
        monkeypatch.setitem(sys.modules, loading.__name__, loading)
        session._put_hooks()
        assert vars(loading)["save_file"] is copy.copy
        loading.__spec__ = None
        late = ModuleType("lightning.pytorch.loggers.logger")
        vars(late).update(Logger=Logger)
        monkeypatch.setitem(sys.modules, late.__name__, late)
        session._put_hooks()
        assert isinstance(vars(Mine)["log_metrics"], Timed)
        assert isinstance(vars(loading)["save_file"], Timed)
        session.abandon()
    assert vars(Mine)["log_metrics"] is original
    assert vars(loading)["save_file"] is copy.copy
