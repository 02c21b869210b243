"""With `optimizer=` a script may do what it does with one process, and gets the same parameters."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel

from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.fsdp import FullyShardedDataParallel
from fireflyer.haiscale.gradients.deferred import CLASSES, DeferredParameter

STEPS = 5
BATCH = 8
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
Step = Callable[["Run", int], None]


def init(path: str, rank: int, world: int) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


class Run:
    """A training: with one process, or wrapped as `kind` says.

    Attributes:
        net: the wrapped module; its parameters are `parameters`.
        one: there is no other rank.
    """

    def __init__(self, kind: str, make: MakeOptimizer, **settings: Any) -> None:
        self.kind, self.one = kind, kind == "one"
        self.net = network()
        self.model: Any = self.net
        if kind == "fsdp":
            self.model = FullyShardedDataParallel(self.net, optimizer=make, **settings)
            self.optimizer: Optimizer = self.model.optimizer
        else:
            self.optimizer = make(self.parameters)
        if kind == "ddp":
            self.model = DistributedDataParallel(self.net, optimizer=self.optimizer, **settings)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step)).double()
        share = x if self.one else x.chunk(dist.get_world_size())[dist.get_rank()]
        out: torch.Tensor = self.model(share)
        return (out**2).mean()

    def train(self, step: Step) -> list[torch.Tensor]:
        """Returns whole parameters."""
        for number in range(STEPS):
            step(self, number)
        state = self.model.state_dict(**({"full": True} if self.kind == "fsdp" else {}))
        return [tensor.detach().clone() for tensor in state.values()]


def differ(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> float:
    """Relatively, at most."""
    pairs = zip(some, others, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def plain(run: Run, number: int) -> None:
    run.optimizer.zero_grad()
    run.loss(number).backward()
    run.optimizer.step()


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.05)


def equals_one(
    kind: str, make: MakeOptimizer, new_step: Callable[[], Step], **settings: Any
) -> bool:
    """`new_step`: makes what a script does in a step, with what it keeps between steps."""
    expected = Run("one", make).train(new_step())
    error = differ(Run(kind, make, **settings).train(new_step()), expected)
    assert error <= 1e-10, (kind, settings, error)
    return True


def two_optimizers(swapped: bool, late: bool) -> Callable[[], Step]:
    """The first has two of four parameters. `swapped`: the second one steps first; `late`: the first one gets
    the third parameter after some steps."""

    def new() -> Step:
        second: list[Optimizer] = []

        def step(run: Run, number: int) -> None:
            if not second:
                second.append(SGD(run.parameters[3 if late else 2 :], lr=0.1))
            if late and number == 2:
                run.optimizer.add_param_group({"params": [run.parameters[2]]})
            run.loss(number).backward()
            both = [run.optimizer, *second]
            for optimizer in reversed(both) if swapped else both:
                optimizer.step()
            for optimizer in both:
                optimizer.zero_grad()

        return step

    return new


def test_two_optimizers(start_gang: Callable[..., Any], store_path: str) -> None:
    def first(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters[:2], lr=0.1)

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        for swapped, late in ((False, False), (True, False), (False, True)):
            script = two_optimizers(swapped, late)
            equals_one("ddp", first, script)
            equals_one("fsdp", first, script)
            equals_one("fsdp", first, script, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        run = Run("ddp", first)
        run.loss(0).backward()
        run.optimizer.step()
        weight, _, other, _ = run.parameters
        return (
            type(weight) is DeferredParameter,
            other.grad is not None,
            type(weight) is DeferredParameter,
        )

    assert start_gang(body, 2).results() == [(True, True, True)] * 2


def test_an_optimizer_of_another_model(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        stranger = adamw(list(network().parameters()))
        message = r"optimizer= has none .*\(0\.weight, 0\.bias, 2\.weight, \.\.\.\)"
        with pytest.raises(ConfigError, match=message):
            DistributedDataParallel(network(), optimizer=stranger)
        with pytest.raises(ConfigError, match=message):
            FullyShardedDataParallel(network(), optimizer=lambda _: stranger)
        run = Run("ddp", adamw)
        run.optimizer.add_param_group({"params": list((other := network()).parameters())})
        with pytest.raises(ConfigError, match="another wrapped model"):
            DistributedDataParallel(other, optimizer=run.optimizer)
        run.model.reducer.stop()
        DistributedDataParallel(other, optimizer=run.optimizer)
        return True

    assert start_gang(body, 1).results() == [True]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_settings_that_are_tensors(
    start_gang: Callable[..., Any], store_path: str, kind: str
) -> None:
    """A scheduler fills a tensor anew; what waits is stepped with its former value."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return AdamW(parameters, lr=torch.tensor(0.05), foreach=False)

    def script() -> Step:
        schedule: list[ExponentialLR] = []

        def step(run: Run, number: int) -> None:
            schedule[:] = schedule or [ExponentialLR(run.optimizer, 0.5)]
            plain(run, number)
            schedule[0].step()

        return step

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        return equals_one(kind, make, script)

    assert start_gang(body, 2).results() == [True, True]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_that_were_looked_at_end_with_the_step(
    start_gang: Callable[..., Any], store_path: str, kind: str
) -> None:
    def look(run: Run, number: int) -> None:
        if run.one:
            run.optimizer.zero_grad()
        run.loss(number).backward()
        assert all(p.grad is not None for p in run.parameters[number % 3 :])
        run.optimizer.step()
        assert run.one or all(p.grad is None for p in run.parameters)

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        return equals_one(kind, adamw, lambda: look)

    assert start_gang(body, 2).results() == [True, True]


def test_wrapped_again(start_gang: Callable[..., Any], store_path: str) -> None:
    """A cell that runs twice: the former wrapper lets go."""

    def wrappers(run: Run) -> Iterator[Any]:
        for _ in range(2):
            yield DistributedDataParallel(run.net, optimizer=run.optimizer)
        yield DistributedDataParallel(run.net)
        yield DistributedDataParallel(run.net, optimizer=run.optimizer)

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        run = Run("ddp", adamw)
        again = wrappers(run)
        former = run.model

        def step(run: Run, number: int) -> None:
            if not run.one and number:
                run.model = next(again)  # while the last step is under way
            plain(run, number)

        expected = Run("one", adamw).train(plain)
        assert differ(run.train(step), expected) <= 1e-10
        with pytest.raises(ConfigError, match="wrapped again"):
            former(torch.ones(1, 8).double())
        return former.reducer.times.reductions, run.model.reducer.times.reductions

    assert start_gang(body, 2).results() == [(1, 1), (1, 1)]


def test_a_wrapper_around_a_wrapper(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        model = DistributedDataParallel(network())
        for wrap in (DistributedDataParallel, FullyShardedDataParallel):
            with pytest.raises(
                ConfigError, match="this module is already a DistributedDataParallel"
            ):
                wrap(model)
            with pytest.raises(ConfigError, match=r"^1 is already a DistributedDataParallel"):
                wrap(nn.Sequential(nn.Tanh(), model))
        model(torch.ones(1, 8).double()).sum().backward()
        return all(p.grad is not None for p in model.parameters())

    assert start_gang(body, 1).results() == [True]


COPIES: dict[str, Callable[[Run], Any]] = {
    "module": lambda run: copy.deepcopy(run.net)(torch.ones(1, 8).double()),
    "average": lambda run: AveragedModel(run.net)(torch.ones(1, 8).double()),
    "parameter": lambda run: nn.Parameter(run.parameters[0]),
    "parameter's copy": lambda run: copy.deepcopy(run.parameters[0]),
}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_copies(start_gang: Callable[..., Any], store_path: str, kind: str) -> None:
    """`fully_shard` refuses copies of a module."""
    copies = list(COPIES.values())[2 if kind == "fsdp" else 0 :]

    def step(run: Run, number: int) -> None:
        plain(run, number)
        if run.one:
            return
        for extra, make in enumerate(copies, 1):
            plain(run, STEPS * extra)
            assert type(run.parameters[0]) in CLASSES.values()
            made, parameter = make(run), run.parameters[0]
            if isinstance(made, nn.Parameter):
                assert type(made) is type(parameter)
                assert type(made) not in CLASSES.values()
                assert made.requires_grad
                assert torch.equal(made, parameter)
            else:
                assert torch.equal(made, run.net(torch.ones(1, 8).double()))
            del made  # an alias that stays makes the next step wait

    def expected(run: Run, number: int) -> None:
        for extra in range(len(copies) + 1):
            plain(run, STEPS * extra or number)

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        return differ(Run(kind, adamw).train(step), Run("one", adamw).train(expected)) <= 1e-10

    assert start_gang(body, 2).results() == [True, True]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_graph_that_backward_goes_through_twice(
    start_gang: Callable[..., Any], store_path: str, kind: str
) -> None:
    """Nobody looks in between, not even a forward."""

    def step(run: Run, number: int) -> None:
        run.optimizer.zero_grad()
        loss = run.loss(number)
        loss.backward(retain_graph=True)
        (3 * loss).backward()
        run.optimizer.step()

    def local(run: Run, number: int) -> None:
        run.optimizer.zero_grad()
        loss = run.loss(number)
        loss.backward(retain_graph=True)
        with contextlib.nullcontext() if run.one else run.model.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
        run.optimizer.step()

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        equals_one(kind, adamw, lambda: step)
        return equals_one(kind, adamw, lambda: local)

    assert start_gang(body, 2).results() == [True, True]


def test_a_scheduler_made_before_wrapping(start_gang: Callable[..., Any], store_path: str) -> None:
    """It is not told that its step was replaced, nor when the wrapper is replaced or ends."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        calls: list[int] = []
        rates = []
        for late in (False, True):
            net = network()
            optimizer = SGD(net.parameters(), lr=1.0)
            optimizer.register_step_post_hook(lambda *_: calls.append(1))
            if late:
                DistributedDataParallel(net, optimizer=optimizer)
            schedule = ExponentialLR(optimizer, 0.5)
            model = DistributedDataParallel(net, optimizer=optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for number in range(3):
                    if number == 2:
                        model.reducer.stop()
                    model(torch.ones(1, 8).double()).sum().backward()
                    optimizer.step()
                    schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates, len(calls)

    assert start_gang(body, 1).results() == [([0.125, 0.125], 6)]
