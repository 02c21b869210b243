"""What torch reads without `__torch_function__`, and optimizers with common counters, in deferred mode."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils import dlpack

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
                found = read(weight, gloo)
            assert found.flatten().tolist() == [value, value], name
        assert functions == (torch.tensor, torch.Tensor.new_tensor, dist.ProcessGroup.broadcast)
        return True

    assert start_gang(body, 2).results() == [True, True]


class Counting(Optimizer):
    """SGD whose rate falls with a count, which it keeps where `place` says."""

    def __init__(self, parameters: Any, place: str, since: int = 0) -> None:
        super().__init__(parameters, {"lr": 1.0, "step": 0, "tensor": torch.zeros(())})
        self.place, self.since, self.calls = place, since, 0
        self.own = {"count": 0}

    def count(self, group: dict[str, Any]) -> float:
        if self.place == "group":
            group["step"] += self.since <= self.state[group["params"][0]].setdefault("steps", 0)
            self.state[group["params"][0]]["steps"] += 1
            return float(group["step"])
        if self.place == "tensor":
            group["tensor"].add_(1)
            return float(group["tensor"])
        if self.place == "state":
            self.state["common"]["count"] = self.state["common"].get("count", 0) + 1  # type: ignore[index]
            return float(self.state["common"]["count"])  # type: ignore[index]
        self.own["count"] += 1
        return float(self.own["count"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["lr"] / (1.0 + self.count(group))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-rate)


PLACES = {
    "group": functools.partial(Counting, place="group"),
    "group, from the third step on": functools.partial(Counting, place="group", since=2),
    "tensor": functools.partial(Counting, place="tensor"),
    "state": functools.partial(Counting, place="state"),
    "attribute": functools.partial(Counting, place="attribute"),
}


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
            return [values, group["step"], float(group["tensor"]), common, optimizer.own]

        for name, make in PLACES.items():
            expected = train("torch", make)
            for kind in ("ddp",) if "third" in name else ("ddp", "fsdp"):
                found = train(kind, make)
                for own, theirs in zip(found[0], expected[0], strict=True):
                    torch.testing.assert_close(torch.tensor(own), torch.tensor(theirs))
                assert found[1:] == expected[1:], (name, kind)
        return True

    assert start_gang(body, 2).results() == [True, True]


def test_an_optimizer_without_counters_defers(start_gang: StartGang, store_path: str) -> None:
    """From its second step on: the first one shows that it has none."""

    class Plain(SGD):
        """No class of torch's."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.Linear(2, 1, bias=False)
        optimizer = Plain(core.parameters(), lr=1.0, momentum=0.9)
        model = DistributedDataParallel(core, optimizer=optimizer)
        kinds = []
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            kinds.append(type(core.weight) is DeferredParameter)
        return kinds

    assert start_gang(body, 2).results() == [[False, True, True]] * 2
