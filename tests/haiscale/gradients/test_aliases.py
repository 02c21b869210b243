"""Scripts that hold gradients, parameters and optimizer state by other names, compared with torch's DDP."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.fsdp import FullyShardedDataParallel

StartGang = Callable[..., Any]
STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2, bias=False)
        self.alias = self.first.weight.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + functional.linear(x, self.alias)
        out: torch.Tensor = self.second(torch.tanh(x))
        return out


class Script:
    """A training script; subclasses hold something between its statements and note its values."""

    def __init__(self, wrap: Callable[[nn.Module, Optimizer], nn.Module]) -> None:
        self.net = Net()
        self.optimizer: Any = SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.held: Any = self.hold()
        self.model = wrap(self.net, self.optimizer)
        self.seen: list[Any] = []

    def hold(self) -> Any: ...

    def before_step(self, step: int) -> None: ...

    def after_step(self, step: int) -> None: ...

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def gradients(self) -> list[Any]:
        return [p.grad for p in self.net.parameters()]

    def note(self, tensors: Any) -> None:
        self.seen.append([torch.as_tensor(tensor).tolist() for tensor in tensors])

    def run(self, rank: int) -> Any:
        for step in range(STEPS):
            self.zero()
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2 * step + rank))
            self.model(x).pow(2).sum().backward()
            self.before_step(step)
            self.optimizer.step()
            self.after_step(step)
        self.note(self.net.state_dict().values())
        return self.seen


class OldGradients(Script):
    """Compares gradients with those of the step before."""

    def before_step(self, step: int) -> None:
        now = self.gradients()
        self.note([a - b for a, b in zip(now, self.held or now, strict=True)])
        self.held = now


class GradientData(Script):
    def before_step(self, step: int) -> None:
        for grad in self.gradients():
            grad.data = grad.data * 2


class DetachedGradients(Script):
    """Zeroes gradients as older versions of torch did."""

    def zero(self) -> None:
        for grad in self.gradients():
            if grad is not None:
                grad.detach_()
                grad.zero_()


class StateDictOfTheBeginning(Script):
    def hold(self) -> Any:
        return self.net.state_dict()

    def after_step(self, step: int) -> None:
        self.note(self.held.values())


class Arrays(Script):
    def hold(self) -> Any:
        return [p.detach().numpy() for p in self.net.parameters()]

    def after_step(self, step: int) -> None:
        self.note(self.held)


class ReadState(Script):
    def after_step(self, step: int) -> None:
        state = self.optimizer.state
        self.note([len(state), *(state[p]["momentum_buffer"] for p in self.net.parameters())])


class RestartedState(Script):
    def after_step(self, step: int) -> None:
        if step == 1:
            self.optimizer.state.clear()


class ReplacedState(Script):
    def after_step(self, step: int) -> None:
        if step == 1:
            self.optimizer.state = copy.copy(self.optimizer.state)
            del self.optimizer.state[self.net.first.weight]


class CopiedOptimizer(Script):
    def after_step(self, step: int) -> None:
        copies = [pickle.loads(pickle.dumps(self.optimizer)), copy.deepcopy(self.optimizer)]
        assert {type(one) for one in copies} == {SGD}
        for one in copies:
            self.note(state["momentum_buffer"] for state in one.state.values())


class LeavesTheGroup(Script):
    def after_step(self, step: int) -> None:
        if step == 1:
            del self.optimizer.param_groups[0]["params"][0]


SYNCHRONOUS = (OldGradients, GradientData, DetachedGradients)
DEFERRED = (
    *(OldGradients, StateDictOfTheBeginning, Arrays, ReadState, RestartedState, ReplacedState),
    *(CopiedOptimizer, LeavesTheGroup),
)


def test_equals_torch(start_gang: StartGang, store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        gloo = dist.new_group(backend="gloo")

        def torchs(net: nn.Module, _: Optimizer) -> nn.Module:
            return nn.parallel.DistributedDataParallel(net, process_group=gloo)

        def synchronous(net: nn.Module, _: Optimizer) -> nn.Module:
            return DistributedDataParallel(net)

        def deferred(net: nn.Module, optimizer: Optimizer) -> nn.Module:
            return DistributedDataParallel(net, optimizer=optimizer, bucket_bytes=16)

        for wrap, kinds in ((synchronous, SYNCHRONOUS), (deferred, DEFERRED)):
            for kind in kinds:
                found, expected = kind(wrap).run(rank), kind(torchs).run(rank)
                assert len(found) == len(expected)
                for mine, theirs in zip(found, expected, strict=True):
                    for one, other in zip(mine, theirs, strict=True):
                        torch.testing.assert_close(
                            torch.tensor(one), torch.tensor(other), msg=f"{kind} {one} {other}"
                        )
        return True

    assert start_gang(body, 2).results() == [True, True]


def test_only_a_held_parameter_keeps_a_sharded_step_from_being_deferred(
    start_gang: StartGang, store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        model: Any = FullyShardedDataParallel(
            nn.Linear(4, 2, bias=False), optimizer=lambda p: SGD(p, lr=1.0)
        )
        weight: Any = next(iter(model.parameters()))
        with torch.no_grad():
            weight.fill_(5.0)
        held: Any = None
        seen = []
        for holds in (False, True):
            held = weight.to_local().detach() if holds else None
            model(torch.ones(1, 4)).sum().backward()
            model.optimizer.step()
            pending = type(weight).__name__
            seen.append((pending, held.tolist() if holds else None, weight.to_local().tolist()))
        return seen

    expected = [("DeferredShard", None, [[4.0] * 4]), ("DTensor", [[3.0] * 4], [[3.0] * 4])]
    assert start_gang(body, 2).results() == [expected] * 2
