"""What torch reads without `__torch_function__`, and optimizers with common counters, in deferred mode."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init
from torch import nn
from torch import tensor as imported
from torch.optim import SGD, Optimizer
from torch.utils import dlpack

from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.fsdp import FullyShardedDataParallel
from fireflyer.haiscale.gradients.deferred import DeferredParameter

StartGang = Callable[..., Any]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.asarray(x, copy=True, requires_grad=False)


class Scripted(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self) -> torch.Tensor:
        return self.weight * 2


apply: Any = Own.apply


def broadcast(weight: nn.Parameter, group: dist.ProcessGroup) -> torch.Tensor:
    with torch.no_grad():
        group.broadcast([weight]).wait()
    return weight


def scattered(weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = torch.zeros(1, 2)
    pieces = [weight, weight] if dist.get_rank() == 0 else None
    with torch.no_grad():
        dist.scatter(out, pieces, src=0, group=group)
    return out


class Special(nn.Parameter):
    """A parameter of a class of its own."""


def special(weight: nn.Parameter) -> torch.Tensor:
    made: Any = Special(weight)
    assert type(made) is Special
    return torch.Tensor.detach(made).clone()


WAYS: dict[str, Callable[..., Any]] = {
    "tensor": lambda w, _: torch.tensor(w),
    "as_tensor": lambda w, _: torch.as_tensor(w, dtype=torch.float64),
    "asarray": lambda w, _: torch.asarray(w, copy=True, requires_grad=False),
    "new_tensor": lambda w, _: torch.zeros(2).new_tensor(w),
    "new": lambda w, _: torch.zeros(2).new(w),
    "set_": lambda w, _: torch.zeros(1, 2).set_(w.detach()),
    "as_subclass": lambda w, _: w.as_subclass(torch.Tensor).clone(),
    "dlpack": lambda w, _: torch.from_dlpack(dlpack.to_dlpack(w)),
    "nested": lambda w, _: torch.nested.nested_tensor([w])[0],
    "sparse": lambda w, _: torch.sparse_coo_tensor(torch.tensor([[0]]), w, (1, 2)).to_dense(),
    "vmap": lambda w, _: torch.vmap(torch.clone)(w),
    "vjp": lambda w, _: torch.func.vjp(torch.clone, w)[0],
    "grad": lambda w, _: torch.func.grad(lambda x: (x * x).sum() / 2)(w),
    "functionalize": lambda w, _: torch.func.functionalize(torch.clone)(w),
    "autograd.Function": lambda w, _: apply(w),
    "imported": lambda w, _: imported(w),
    "_make_subclass": lambda w, _: torch.Tensor._make_subclass(torch.Tensor, w).clone(),
    "subclass of Parameter": lambda w, _: special(w),
    "group": broadcast,
    "scatter": scattered,
}


def scripted_ways(weight: Any) -> dict[str, Callable[..., Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        function, module = torch.jit.script(double), torch.jit.script(Scripted(weight))
    return {
        "scripted function": lambda w, _: function(w) / 2,
        "scripted module apart": lambda *_: module() / 2,
    }


def test_torch_reads_the_new_value_without_our_hook(start_gang: StartGang, store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        gloo = dist.new_group(backend="gloo")
        functions = torch.tensor, torch.Tensor.new_tensor, dist.ProcessGroup.broadcast
        core = nn.Linear(2, 1, bias=False)
        ways = {**WAYS, **scripted_ways(core.weight)}
        optimizer = SGD(core.parameters(), lr=1.0)
        model = DistributedDataParallel(core, optimizer=optimizer)
        value = 5.0
        with torch.no_grad():
            core.weight.fill_(value)
        for name, read in ways.items():
            model(torch.full((1, 2), 2.0 * rank)).sum().backward()
            optimizer.step()
            value -= 1.0
            weight = core.weight
            assert type(weight) is DeferredParameter, name
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch advises other ways
                found = read(weight, gloo).flatten().tolist()  # no alias of the memory stays
            assert found == [value, value], name
        assert functions == (torch.tensor, torch.Tensor.new_tensor, dist.ProcessGroup.broadcast)
        return True

    assert start_gang(body, 2).results() == [True, True]


class Counting(Optimizer):
    """SGD whose rate falls with what it keeps for all parameters, where `place` says.

    Args:
        since: number of steps before it begins to change that.
    """

    def __init__(self, parameters: Any, place: str, since: int = 0) -> None:
        super().__init__(parameters, {"lr": 1.0, "step": 0, "tensor": torch.zeros(())})
        self.place, self.since = place, since
        self.own = {"count": 0}
        self.common = torch.zeros(())

    def rate(self, group: dict[str, Any]) -> float:
        state: Any = self.state
        first = state[group["params"][0]]
        steps = first["steps"] = first.get("steps", 0) + 1
        counts = int(steps > self.since)
        for parameter in group["params"]:
            state[parameter].setdefault("shared", self.common)
        if self.place == "group":
            group["step"] += counts
        elif self.place == "tensor of a group":
            group["tensor"].add_(counts)
        elif self.place == "state":
            state["common"]["count"] = state["common"].get("count", 0) + counts
        elif self.place == "tensor of states":
            first["shared"].add_(counts)
        elif self.place == "attribute":
            self.own["count"] += counts
        elif self.place == "norm of all gradients" and counts:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            self.common.copy_(torch.nn.utils.get_total_norm(grads))
        seen = state.get("common", {}).get("count", 0)
        told = self.own["count"] + seen + group["step"] + group["tensor"] + self.common
        return float(group["lr"]) / (1.0 + float(told))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = self.rate(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-rate)


PLACES = ("group", "tensor of a group", "state", "tensor of states", "attribute")


def test_counters_of_an_optimizer_count_steps(start_gang: StartGang, store_path: str) -> None:
    """As beside torch's own wrapper, to which the script is the same."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)

        def train(kind: str, make: Any) -> list[Any]:
            core = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
            for parameter in core.parameters():
                nn.init.constant_(parameter, 0.25)
            if kind == "fsdp":
                model: Any = FullyShardedDataParallel(
                    core, optimizer=make, auto_wrap_policy={nn.Linear}
                )
                optimizer: Any = model.optimizer
            else:
                optimizer = make(core.parameters())
                wrapper: Any = nn.parallel.DistributedDataParallel
                if kind == "ddp":
                    wrapper = functools.partial(
                        DistributedDataParallel, optimizer=optimizer, bucket_bytes=1
                    )
                model = wrapper(core)
            for step in range(4):
                optimizer.zero_grad()
                model(torch.full((1, 2), 0.1 * step + rank).double()).sum().backward()
                optimizer.step()
            full = {"full": True} if kind == "fsdp" else {}
            values = [value.tolist() for value in model.state_dict(**full).values()]
            group = optimizer.param_groups[0]
            common = optimizer.state.get("common")
            counted = [group["step"], float(group["tensor"]), common, optimizer.own]
            return [values, *counted, float(optimizer.common)]

        ways = [(place, since) for place in PLACES for since in (0, 2)]
        for place, since in [*ways, ("norm of all gradients", 2)]:
            make = functools.partial(Counting, place=place, since=since)
            expected = train("torch", make)
            # The norm of shards that this optimizer computes is not that of the whole parameters.
            for kind in ("ddp", "fsdp") if place in PLACES and since else ("ddp",):
                found = train(kind, make)
                for own, theirs in zip(found[0], expected[0], strict=True):
                    torch.testing.assert_close(torch.tensor(own), torch.tensor(theirs))
                assert found[1:] == expected[1:], (place, since, kind)
        return True

    assert start_gang(body, 2).results() == [True, True]


class Named(SGD):
    """torch's, with arguments of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1.0, momentum=0.9)


Stepping: Any = type("Stepping", (Named,), {"step": lambda self, _=None: SGD.step(self)})
Separable: Any = type("Separable", (Stepping,), {"separable": True})


class Wrong(Counting):
    separable = True


def test_separable_optimizers_defer(start_gang: StartGang, store_path: str) -> None:
    """Those of torch's code, and those that say so, until a step shows that it is not true."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        kinds = {}
        for make in (Named, Stepping, Separable):
            core = nn.Linear(2, 1, bias=False)
            optimizer: Any = make(core.parameters())
            model = DistributedDataParallel(core, optimizer=optimizer)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            kinds[make.__name__] = type(core.weight) is DeferredParameter
        for place in ("group", "tensor of a group"):
            optimizer = Wrong(core.parameters(), place=place, since=1)
            model = DistributedDataParallel(core, optimizer=optimizer)
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            with pytest.raises(ConfigError, match="Wrong says separable = True, but its step"):
                core.weight.sum()
        return kinds

    kinds = {"Named": True, "Stepping": False, "Separable": True}
    assert start_gang(body, 2).results() == [kinds] * 2
