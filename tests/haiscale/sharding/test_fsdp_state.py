"""What a sharded module shows of itself: states, whole parameters, pending shards; and what it refuses."""

import io
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import: once here, not in each forked rank
import torch.distributed as dist
from tests.haiscale.sharding.test_fsdp import BLOCKS, Model, data, init, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.haiscale.fsdp import FullyShardedDataParallel, hybrid_mesh
from fireflyer.haiscale.gradients.deferred_shard import DeferredShard
from fireflyer.haiscale.mesh import DIMENSIONS, REPLICATE, SHARD

ADAMW = partial(torch.optim.AdamW, lr=0.01)


def steps(model: nn.Module, optimizer: Any, numbers: range, share: slice = slice(None)) -> None:
    for step in numbers:
        optimizer.zero_grad()
        loss_of(model, data(step)[share]).backward()
        optimizer.step()


def pending(model: nn.Module) -> list[bool]:
    return [isinstance(p, DeferredShard) for p in model.parameters() if p.requires_grad]


def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path
) -> None:
    def build(seed: int) -> Model:
        core = Model(seed).double()
        del core.never  # what was never stepped has no moments
        return core

    reference = build(0)
    steps(reference, ADAMW([*reference.parameters()]), range(6))

    def saves(rank: int, world: int) -> None:
        init(store_path, rank, world)
        model = FullyShardedDataParallel(build(0), optimizer=ADAMW, auto_wrap_policy=BLOCKS)
        assert model.optimizer is not None
        steps(model, model.optimizer, range(3), slice(rank, None, world))
        assert all(pending(model))
        weights, moments = get_state_dict(model.module, model.optimizer)
        manager = CheckpointManager(tmp_path / "c")
        manager.save(3, {"model": weights, "optimizer": moments}).wait()
        dist.barrier()

    def loads(rank: int, world: int) -> dict[str, Any]:
        init(store_path + "-2", rank, world)
        core = build(5)
        core.calls = 3
        mesh = hybrid_mesh()
        model = FullyShardedDataParallel(
            core, optimizer=ADAMW, auto_wrap_policy=BLOCKS, mesh=mesh, reshard_after_forward=False
        )
        assert model.optimizer is not None
        weights, moments = get_state_dict(model.module, model.optimizer)
        into = {"model": weights, "optimizer": moments}
        CheckpointManager(tmp_path / "c").load(into=into, rest=False)
        set_state_dict(
            model.module, model.optimizer, model_state_dict=weights, optim_state_dict=moments
        )
        steps(model, model.optimizer, range(3, 6), slice(rank, None, world))
        return {name: t.numpy() for name, t in model.state_dict(full=True).items()}

    start_gang(saves, 4).results()
    for found in start_gang(loads, 2).results():
        for name, tensor in reference.state_dict().items():
            assert torch.allclose(torch.from_numpy(found[name]), tensor, rtol=1e-10, atol=1e-12)


def test_states_sharded_and_whole(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> bool:
        init(store_path, rank, world)
        model = FullyShardedDataParallel(Model(3), auto_wrap_policy=BLOCKS)
        original = Model(3 if rank == 0 else 0).state_dict()
        shards = model.state_dict()
        assert list(shards) == list(original)
        assert all(isinstance(shards[name], DTensor) for name, _ in model.module.named_parameters())
        whole = model.state_dict(full=True)
        if rank == 0:
            assert all(torch.equal(whole[name], original[name]) for name in original)
        other = FullyShardedDataParallel(Model(4), reshard_after_forward=False)
        other.load_state_dict(whole)
        assert all(map(torch.equal, other.state_dict(full=True).values(), whole.values()))
        third = FullyShardedDataParallel(Model(5), auto_wrap_policy=BLOCKS)
        third.load_state_dict(shards)
        assert all(map(torch.equal, third.state_dict(full=True).values(), whole.values()))
        around = nn.ModuleDict({"a": third, "b": nn.Linear(2, 2)})
        assert "a.module.words.weight" in around.state_dict()
        around.load_state_dict(around.state_dict())
        with pytest.raises(RuntimeError, match=r"size mismatch for never\.bias"):
            third.load_state_dict({**whole, "never.bias": torch.ones(4)})
        return True

    assert start_gang(body, 3).results() == [True] * 3


def test_whole_parameters_for_a_while(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> bool:
        init(store_path, rank, world)
        core = Model()
        policy = MixedPrecisionPolicy(torch.bfloat16)
        model = FullyShardedDataParallel(
            core, auto_wrap_policy=BLOCKS, optimizer=ADAMW, mixed_precision=policy
        )
        steps(model, model.optimizer, range(1))
        with FullyShardedDataParallel.summon_full_params(nn.Sequential(model)):
            assert type(core.words.weight) is nn.Parameter
            assert core.words.weight.shape == (31, 10)
            assert core.words.weight.dtype == torch.float32
            with torch.no_grad():
                core.words.weight.copy_(torch.arange(310.0).view(31, 10))
            with pytest.raises(ConfigError, match="summon_full_params is open"):
                model(data(0)[:, :-1])
        assert isinstance(core.words.weight, DTensor)
        wanted = torch.arange(310.0).view(31, 10)
        assert torch.equal(model.state_dict(full=True)["words.weight"], wanted)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            core.words.weight.data.zero_()
        assert torch.equal(model.state_dict(full=True)["words.weight"], wanted)
        steps(model, model.optimizer, range(2))
        return True

    assert start_gang(body, 2).results() == [True] * 2


LOOKS: dict[str, Callable[[Any], object]] = {
    "print": repr,
    "local": lambda p: p.to_local(),
    "whole": lambda p: p.full_tensor(),
    "slot": lambda p: p._local_tensor,
    "arithmetic": lambda p: p + 1,
    "list": lambda p: torch._foreach_norm([p]),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "address": lambda p: p.data_ptr(),
}


def test_whoever_looks_at_a_shard_sees_the_new_value(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> bool:
        init(store_path, rank, world)
        core = nn.Linear(4, 4)
        sgd = partial(torch.optim.SGD, lr=0.1)
        model = FullyShardedDataParallel(core, optimizer=sgd)
        assert model.optimizer is not None
        with torch.no_grad():
            core.bias.zero_()
        bias = 0.0
        for name, look in LOOKS.items():
            model(torch.ones(1, 4)).sum().backward()
            model.optimizer.step()
            bias -= 0.1
            assert all(pending(core)), name
            assert core.bias.shape == (4,)
            assert core.bias.grad is None
            assert all(pending(core)), "metadata, and a gradient that is used up, make nobody wait"
            look(core.bias)
            assert not any(pending(core)), name
            local: Any = core.bias
            assert local.to_local().tolist() == pytest.approx([bias] * 2), name
        return True

    assert start_gang(body, 2).results() == [True, True]


def test_a_unit_waits_until_its_turn(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        policy = ModuleWrapPolicy({nn.Linear})
        sgd = partial(torch.optim.SGD, lr=0.1)
        model = FullyShardedDataParallel(core, optimizer=sgd, auto_wrap_policy=policy)
        optimizer: Any = model.optimizer
        seen = []
        for layer in core:
            layer.register_forward_hook(
                lambda *_: seen.append([unit.flight is not None for unit in model._units])
            )
        for _ in range(3):
            seen.clear()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return seen

    one_ahead = [
        [False, False, True, True],
        [False, False, False, True],
        [False] * 4,
        [False] * 4,
    ]
    assert start_gang(body, 2).results() == [one_ahead, one_ahead]


def test_parameters_are_gathered_ahead_in_the_order_of_the_last_forward(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    """Also when the order changes: the outcome is right, and all ranks gather the same."""

    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(4)])

        def forward(self, x: torch.Tensor, way: list[int]) -> torch.Tensor:
            for number in way:
                x = self.parts[number](x)
            return x

    ways = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3], [3, 2, 1, 0], [0, 1, 0, 1], [0, 1, 0, 1]]

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        torch.manual_seed(0)
        core = Ways()
        plain = Ways()
        plain.load_state_dict(core.state_dict())
        model = FullyShardedDataParallel(
            core, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), forward_prefetch=2
        )
        order: list[int] = []
        for number, unit in enumerate(model._units):
            gather = unit.group._all_gather_comm

            def noted(*args: Any, number: int = number, gather: Any = gather, **how: Any) -> Any:
                order.append(number)
                return type(gather).__call__(gather, *args, **how)

            comm = type("Noted", (), {"allocate": gather.allocate, "__call__": staticmethod(noted)})
            unit.group._all_gather_comm = comm()
        x = torch.ones(1, 4)
        with torch.no_grad():
            for way in ways:
                order.append(-1)
                assert torch.equal(model(x, way), plain(x, way))
        return order

    first, second = start_gang(body, 2).results()
    assert first == second
    one = [-1, 0, 1, 2, 3]
    assert first[:10] == one + one
    assert first[10:15] == [-1, 0, 1, 2, 3], "1 was for nothing"
    assert first[15:20] == [-1, 3, 2, 1, 0]
    assert first[20:] == [-1, 0, 1, 0, 1] * 2


def test_evaluation_sees_what_the_last_step_did(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    """ZeRO-2 keeps what it gathered for an evaluation: not beyond a step of the optimizer."""

    def body(rank: int, world: int) -> list[float]:
        init(store_path, rank, world)
        core = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            core.weight.zero_()
        model = FullyShardedDataParallel(core, reshard_after_forward=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            with torch.no_grad():
                model(torch.ones(1, 2))
            optimizer.step()
            with torch.no_grad():
                found.append(float(model(torch.ones(1, 2))))
        return found

    assert start_gang(body, 2).results() == [[-2.0, -4.0, -6.0]] * 2


def test_modules_on_the_meta_device(start_gang: Callable[..., Any], store_path: str) -> None:
    """Tied parameters stay tied; the first rank's values go to all; whole units exist one at a time."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        torch.manual_seed(rank)

        class Tied(Model):
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Linear(10, 31, bias=False)
                self.head.weight = self.words.weight

        with torch.device("meta"):
            core = Tied()
        alive: list[int] = []

        def fill(module: nn.Module) -> None:
            alive.append(
                sum(not isinstance(p, DTensor) and not p.is_meta for p in core.parameters())
            )
            for tensor in (*module.parameters(False), *module.buffers(False)):
                tensor.data.uniform_()

        model = FullyShardedDataParallel(core, auto_wrap_policy=BLOCKS, param_init_fn=fill)
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
        assert core.head.weight is core.words.weight
        assert max(alive) <= 7, "a block has 7 parameters, the outermost unit 3"
        with torch.device("meta"):
            again = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        other = FullyShardedDataParallel(again)
        assert torch.equal(other.state_dict(full=True)["1.weight"], torch.ones(3))
        with torch.device("meta"):
            wants = Model()
        with pytest.raises(ConfigError, match=r"Block .*param_init_fn"):
            FullyShardedDataParallel(wants, auto_wrap_policy=BLOCKS)
        return [t.tolist() for t in model.state_dict(full=True).values()]

    first, second = start_gang(body, 2).results()
    assert first == second


def test_a_parameter_used_on_one_rank_only(start_gang: Callable[..., Any], store_path: str) -> None:
    class Pick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([torch.ones(4) for _ in range(3)])

        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            result: torch.Tensor = (x * self.parts[which]).sum()
            return result

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        model = FullyShardedDataParallel(Pick())
        model(torch.ones(4), which=rank).backward()
        grads: list[Any] = [p.grad for p in model.parameters()]
        return [g is not None and g.full_tensor().tolist() for g in grads]

    assert start_gang(body, 2).results() == [[[0.5] * 4, [0.5] * 4, False]] * 2


def refusal(module: nn.Module, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        FullyShardedDataParallel(module, **options)
    return str(caught.value)


def test_what_is_refused(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> list[str]:
        init(store_path, rank, world)
        tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        tied[1].weight = tied[0].weight
        mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float64))
        linears = ModuleWrapPolicy({nn.Linear})
        fine = nn.Linear(2, 2)
        own = CustomPolicy(lambda part: {"mesh": None} if isinstance(part, nn.Linear) else False)
        cube = DeviceMesh("cpu", [[[0]]], mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
        return [
            refusal(nn.ReLU()),
            refusal(nn.Sequential(nn.LazyLinear(3))),
            refusal(nn.ParameterList([torch.ones(())])),
            refusal(nn.ParameterList([torch.ones(1), torch.ones(0, 3)])),
            refusal(tied, auto_wrap_policy=linears),
            refusal(mixed),
            refusal(mixed, auto_wrap_policy=own),
            refusal(fine, wire="int3"),
            refusal(fine, gather_dtype=torch.int8),
            refusal(fine, backlog=0),
            refusal(fine, mesh=cube),
            refusal(fine, mesh=cube["dp_shard"], process_group=dist.group.WORLD),
            refusal(fine, mixed_precision=MixedPrecisionPolicy(reduce_dtype=torch.float64)),
            refusal(nn.Linear(2, 2), optimizer=torch.optim.SGD([torch.ones(1)])),
            refusal(nn.Linear(2, 2), optimizer=torch.optim.LBFGS),
            refusal(nn.Linear(2, 2), optimizer=list),
        ]

    expected = [
        "no parameter requires a gradient",
        "0.weight has no shape yet",
        "0 is a scalar",
        "1 has no elements",
        "0.weight is shared by 0 and 1",
        "0.weight is torch.float32, but 1.weight of the same unit (the module) is torch.float64",
        "arguments to single units",
        "int3",
        "invalid gather_dtype 'torch.int8'",
        "invalid backlog 0",
        "not 3: slice it",
        "not both",
        "cannot be reduced as torch.float64",
        "wrapping replaces parameters",
        "LBFGS",
        "returned a list",
    ]
    for said, wanted in zip(start_gang(body, 1).results()[0], expected, strict=True):
        assert wanted in said


def test_ranks_that_differ_groups_of_gloo_and_changes_afterwards(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> list[str]:
        store = dist.FileStore(store_path, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        said = [refusal(nn.Linear(2, 2))]
        group = dist.new_group(backend="hfreduce")
        said.append(refusal(nn.Linear(2, 2 + rank), process_group=group))
        model = FullyShardedDataParallel(nn.Linear(2, 2), group)
        model(torch.ones(1, 2)).sum().backward()
        model.module.extra = nn.Parameter(torch.ones(3))
        with pytest.raises(ConfigError, match=r"extra was added or replaced") as caught:
            model(torch.ones(1, 2))
        return [*said, str(caught.value)]

    for backend, shape, _ in start_gang(body, 2).results():
        assert "backend 'hfreduce'" in backend
        assert "rank 0 has parameter weight (2, 2) torch.float32, rank 1 has" in shape


def test_hosts_of_different_sizes_do_not_replicate_one_another(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> str:
        init(store_path, rank, world)
        with pytest.raises(ConfigError) as caught:
            hybrid_mesh()
        return str(caught.value)

    for said in start_gang(body, 3, 2).results():
        assert "not 2, 1" in said


def test_gradients_that_are_not_finite(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        core = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        model = FullyShardedDataParallel(core)
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("fireflyer").addHandler(handler)
        bad = torch.zeros(3)
        bad[1] = float("nan") if rank else 0.0
        core[0].register_forward_hook(lambda _m, _i, out: out + bad * out)
        core[1].register_forward_hook(lambda *_: torch.nan_to_num(_[-1]) * 1.0)
        model(torch.ones(1, 2)).sum().backward()
        return records

    quiet, loud = start_gang(body, 2).results()
    assert quiet == []
    assert len(loud) == 1
    assert loud[0].startswith("rank 1 has gradients that are not finite: 0.weight")


def test_a_backward_that_failed(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        core = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = FullyShardedDataParallel(core, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                raise ValueError("in the middle of backward")

        core[0].register_forward_pre_hook(lambda _m, args: Fails.apply(args[0]))  # type: ignore[no-untyped-call]
        with pytest.raises(ValueError, match="in the middle"):
            model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        with pytest.raises(CollectiveError, match="half way"):
            model(torch.ones(1, 2))

    start_gang(body, 2).results()


def test_the_dimensions_have_names() -> None:
    assert DIMENSIONS == ("pp", "dp_replicate", "dp_shard", "ep", "tp")
    assert DIMENSIONS[1:3] == (REPLICATE, SHARD)
