"""Programs and libraries written for torch.distributed work unchanged, and train as one process would."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import Play
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
BATCH = 12
by_shape = pytest.mark.parametrize("shape", ["AA", "AAB"])


class Net(nn.Module):
    """Two hidden layers, of which a forward may leave one out, and an embedding."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.words = nn.Embedding(20, 24)
        self.first = nn.Linear(24, 48)
        self.second = nn.Linear(48, 48)
        self.last = nn.Linear(48, 4)
        self.double()

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = torch.tanh(self.first(self.words(x)))
        x = x if skip else torch.tanh(self.second(x))
        result: torch.Tensor = self.last(x)
        return result


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(20, (BATCH,), generator=generator)
    return x, torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)


def share(rank: int, world: int) -> slice:
    return slice(rank * BATCH // world, (rank + 1) * BATCH // world)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    part: slice = slice(None),
    skip: Callable[[int], bool] = lambda step: False,
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        (model(x[part], skip(step)) - y[part]).square().mean().backward()
        optimizer.step()


def alone(skip: Callable[[int], bool] = lambda step: False) -> list[torch.Tensor]:
    """The parameters that one process has after training on the whole batches."""
    net = Net()
    train(net, torch.optim.Adam(net.parameters(), lr=0.01), skip=skip)
    return [p.detach() for p in net.parameters()]


def close(got: Any, wanted: list[torch.Tensor], limit: float = 1e-9) -> bool:
    pairs = list(zip(got, wanted, strict=True))
    return all(bool(((g.detach() - w).abs() <= limit).all()) for g, w in pairs)


# -- data parallelism ------------------------------------------------------------------------------


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@by_shape
def test_ddp(play: Play, shape: str, options: dict[str, Any]) -> None:
    def skip(step: int) -> bool:
        return "find_unused_parameters" in options and step == 1

    wanted = alone(skip)

    def body(rank: int, world: int) -> bool:
        net = Net()
        model = DistributedDataParallel(net, **options)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        train(model, optimizer, share(rank, world), skip)
        return close(net.parameters(), wanted)

    assert all(play(body, shape))


def test_ddp_starts_from_the_first_rank_and_shares_buffers(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(rank)
        net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        model = DistributedDataParallel(net)
        first = [torch.zeros_like(p) for p in net.parameters()]
        for mine, theirs in zip(net.parameters(), first, strict=True):
            theirs.copy_(mine.detach())
            dist.broadcast(theirs, 0)
            assert torch.equal(mine.detach(), theirs)
        for _ in range(2):
            model(torch.randn(8, 6)).sum().backward()
        model(torch.randn(8, 6))
        means: list[Any] = [None] * world
        dist.all_gather_object(
            means, [p.grad.tolist() for p in net.parameters() if p.grad is not None]
        )
        assert means == [means[0]] * world

    play(body, "AAB")


@by_shape
def test_ddp_with_hooks_that_compress(play: Play, shape: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wanted = alone()

    def in_bf16(state: Any, bucket: dist.GradBucket) -> Any:
        """torch refuses the hook itself by its name where there is no CUDA."""
        return default_hooks.bf16_compress_hook(state, bucket)

    in_bf16.__annotations__.clear()  # torch compares their text

    def body(rank: int, world: int) -> None:
        hooks: tuple[tuple[Any, float], ...] = (
            (in_bf16, 0.08),
            (default_hooks.fp16_compress_hook, 0.08),
            (default_hooks.allreduce_hook, 1e-9),
        )
        for hook, limit in hooks:
            net = Net()
            model = DistributedDataParallel(net)
            model.register_comm_hook(None, hook)
            train(model, torch.optim.Adam(net.parameters(), lr=0.01), share(rank, world))
            assert close(net.parameters(), wanted, limit), hook

    play(body, shape)


def test_ddp_with_no_sync_adds_gradients_up(play: Play) -> None:
    x, y = batch(0)
    net = Net()
    (net(x) - y).square().mean().backward()
    wanted = [p.grad for p in net.parameters() if p.grad is not None]

    def body(rank: int, world: int) -> bool:
        net = Net()
        model = DistributedDataParallel(net)
        xs, ys = x[share(rank, world)].chunk(2), y[share(rank, world)].chunk(2)
        with model.no_sync():
            ((model(xs[0]) - ys[0]).square().mean() / 2).backward()
        ((model(xs[1]) - ys[1]).square().mean() / 2).backward()
        return close((p.grad for p in net.parameters() if p.grad is not None), wanted)

    assert all(play(body, "AAB"))


def test_ddp_join_with_uneven_inputs(play: Play) -> None:
    from torch.distributed.algorithms.join import Join

    def body(rank: int, world: int) -> list[float]:
        net = Net()
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with Join([model]):
            for step in range(2 + 2 * rank):
                optimizer.zero_grad()
                x, y = batch(step)
                (model(x) - y).square().mean().backward()
                optimizer.step()
        return [float(p.detach().sum()) for p in net.parameters()]

    first, *others = play(body, "AAB")
    assert others == [first, first]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@by_shape
def test_zero_redundancy_optimizer(play: Play, shape: str) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wanted = alone()

    def body(rank: int, world: int) -> bool:
        net = Net()
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
        )
        train(DistributedDataParallel(net), optimizer, share(rank, world))
        optimizer.consolidate_state_dict(0)
        whole = rank != 0 or len(optimizer.state_dict()["state"]) == len(wanted)
        return whole and close(net.parameters(), wanted)

    assert all(play(body, shape))


def test_a_loop_with_a_distributed_sampler(play: Play) -> None:
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    def body(rank: int, world: int) -> None:
        data = TensorDataset(torch.arange(30))
        sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True, seed=5)
        loader = DataLoader(data, batch_size=5, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            seen = torch.cat([numbers for (numbers,) in loader])
            everything = torch.zeros(30, dtype=torch.int64)
            dist.all_gather_into_tensor(everything, seen)
            assert sorted(everything.tolist()) == list(range(30))

    play(body, "AAB")


# -- sharded parameters ----------------------------------------------------------------------------


def sharded(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    net = Net()
    for layer in (net.first, net.second, net):
        fully_shard(layer, mesh=mesh)
    return net


def whole_of(tensor: Any) -> torch.Tensor:
    """The plain tensor of a DTensor, on every rank."""
    whole: torch.Tensor = tensor.full_tensor()
    return whole.detach()


def full_parameters(net: nn.Module) -> list[torch.Tensor]:
    return [whole_of(p) for p in net.parameters()]


@by_shape
def test_fsdp(play: Play, shape: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    wanted = alone()

    def body(rank: int, world: int) -> bool:
        net = sharded(init_device_mesh("cpu", (world,)))
        train(net, torch.optim.Adam(net.parameters(), lr=0.01), share(rank, world))
        return close(full_parameters(net), wanted)

    assert all(play(body, shape))


def test_fsdp_with_mixed_precision_and_clipped_gradients(play: Play) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def body(rank: int, world: int) -> None:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
        whole = [p.detach().clone() for p in net.parameters()]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(net, mp_policy=policy)
        net(torch.ones(4, 16)).float().square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        assert float(whole_of(norm)) > 1e-3
        torch.optim.SGD(net.parameters(), lr=1.0).step()
        moved = [g - w for g, w in zip(full_parameters(net), whole, strict=True)]
        total = sum(float(m.double().square().sum()) for m in moved) ** 0.5
        assert abs(total - 1e-3) < 1e-5

    play(body, "AAB")


def test_hybrid_sharding_on_a_mesh_of_hosts(play: Play) -> None:
    """Shards inside a host, replicas between hosts."""
    from torch.distributed.device_mesh import init_device_mesh

    wanted = alone()

    def body(rank: int, world: int) -> bool:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        net = sharded(mesh)
        train(net, torch.optim.Adam(net.parameters(), lr=0.01), share(rank, world))
        return close(full_parameters(net), wanted)

    assert all(play(body, "AABB"))


def test_distributed_checkpoint(play: Play, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    def body(rank: int, world: int) -> bool:
        mesh = init_device_mesh("cpu", (world,))
        net = sharded(mesh)
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), share(rank, world))
        saved = full_parameters(net)
        state: dict[str, Any] = {"model": get_model_state_dict(net), "step": 7}
        dcp.save(state, checkpoint_id=str(tmp_path / "checkpoint"))
        other = sharded(mesh)
        state = {"model": get_model_state_dict(other), "step": 0}
        dcp.load(state, checkpoint_id=str(tmp_path / "checkpoint"))
        set_model_state_dict(other, state["model"])
        return state["step"] == 7 and close(full_parameters(other), saved, 0.0)

    assert all(play(body, "AAB"))


# -- meshes and distributed tensors ----------------------------------------------------------------


def test_a_mesh_of_two_dimensions(play: Play) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        row, column = rank // 2, rank % 2
        for names, wanted in (("tp", [2 * row, 2 * row + 1]), ("dp", [column, column + 2])):
            group = mesh[names].get_group()
            assert dist.get_backend(group) == "hfreduce"
            assert dist.get_process_group_ranks(group) == wanted
            tensor = torch.full((20_000,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert bool((tensor == sum(wanted)).all())
        flat = mesh["dp", "tp"]._flatten()
        tensor = torch.ones(5)
        dist.all_reduce(tensor, group=flat.get_group())
        assert tensor[0] == 4

    play(body, "AABB")


@by_shape
def test_distributed_tensors(play: Play, shape: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    left = torch.arange(35.0, dtype=torch.float64).view(5, 7) / 7
    right = torch.arange(42.0, dtype=torch.float64).view(7, 6) / 5

    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        layouts = (Replicate(), Shard(0), Shard(1))
        for before in layouts:
            for after in layouts:
                moved = distribute_tensor(left, mesh, [before]).redistribute(mesh, [after])
                assert torch.equal(whole_of(moved), left), (before, after)
        for a in layouts:
            for b in layouts:
                product = distribute_tensor(left, mesh, [a]) @ distribute_tensor(right, mesh, [b])
                error = (whole_of(product) - left @ right).abs().max()
                assert float(error) < 1e-10, (a, b)
        partial: Any = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(
            right, mesh, [Shard(0)]
        )
        assert partial.placements == (Partial(),)
        scattered = partial.redistribute(mesh, [Shard(0)])
        assert float((whole_of(scattered) - left @ right).abs().max()) < 1e-10

    play(body, shape)


def test_tensor_parallel_layers(play: Play) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def body(rank: int, world: int) -> None:
        net = Net()
        x, _ = batch(0)
        wanted = net(x).detach()
        mesh = init_device_mesh("cpu", (world,))
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(net, mesh, plan)
        got = net(x)
        assert close([got], [wanted])
        got.square().sum().backward()

    play(body, "AB")


# -- functional collectives ------------------------------------------------------------------------


@by_shape
def test_functional_collectives(play: Play, shape: str) -> None:
    import torch.distributed._functional_collectives as functional

    def body(rank: int, world: int) -> None:
        group: Any = dist.group.WORLD
        ranks = range(world)

        def mine(r: int = rank) -> torch.Tensor:
            return torch.arange(6.0 * world).view(world * 2, 3) + 100 * r

        total = sum((mine(r) for r in ranks), torch.zeros(world * 2, 3))
        for op, wanted in (("sum", total), ("avg", total / world), ("max", mine(world - 1))):
            assert torch.equal(functional.all_reduce(mine(), op, group), wanted), op
        gathered = functional.all_gather_tensor(mine(), 0, group)
        assert torch.equal(gathered, torch.cat([mine(r) for r in ranks]))
        gathered = functional.all_gather_tensor(mine(), 1, group)
        assert torch.equal(gathered, torch.cat([mine(r) for r in ranks], 1))
        part = functional.reduce_scatter_tensor(mine(), "sum", 0, group)
        assert torch.equal(part, total[2 * rank : 2 * rank + 2])
        exchanged = functional.all_to_all_single(mine(), None, None, group)
        wanted = torch.cat([mine(r)[2 * rank : 2 * rank + 2] for r in ranks])
        assert torch.equal(exchanged, wanted)
        sizes = [r + 1 for r in ranks]
        uneven = functional.all_to_all_single(
            mine()[:1].repeat(sum(sizes), 1), [rank + 1] * world, sizes, group
        )
        wanted = torch.cat([mine(r)[:1].repeat(rank + 1, 1) for r in ranks])
        assert torch.equal(uneven, wanted)
        assert torch.equal(functional.broadcast(mine(), 1, group), mine(1))
        several = functional.all_reduce_coalesced([mine(), mine() * 2], "sum", group)
        assert [torch.equal(s, t) for s, t in zip(several, (total, total * 2), strict=True)]
        several = functional.all_gather_into_tensor_coalesced([mine(), mine() + 1], group)
        assert torch.equal(several[1], torch.cat([mine(r) + 1 for r in ranks]))
        several = functional.reduce_scatter_tensor_coalesced([mine()] * 2, "sum", [0, 0], group)
        assert torch.equal(several[1], total[2 * rank : 2 * rank + 2])

    play(body, shape)


@pytest.mark.usefixtures("compiler")
def test_functional_collectives_under_the_compiler(play: Play) -> None:
    """Traced by dynamo and run eagerly: no code generator is needed for what the graph calls."""
    import torch._dynamo
    import torch.distributed._functional_collectives as functional

    def body(rank: int, world: int) -> None:
        group: Any = dist.group.WORLD

        def step(x: torch.Tensor) -> torch.Tensor:
            x = functional.all_reduce(x * 2, "sum", group)
            return functional.all_gather_tensor(x + 1, 0, group)

        compiled = torch.compile(step, backend="eager", fullgraph=True)
        x = torch.full((4,), 1.0 + rank)
        assert torch.equal(compiled(x), torch.full((8,), 7.0))

    play(body, "AB")


@by_shape
def test_collectives_with_gradients(play: Play, shape: str) -> None:
    """torch.distributed.nn: the backward of each is the transposed collective."""
    import torch.distributed.nn.functional as functional

    def body(rank: int, world: int) -> None:
        def leaf(*shape: int) -> torch.Tensor:
            return torch.ones(*shape, dtype=torch.float64, requires_grad=True)

        def gradient(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            (result,) = torch.autograd.grad(output, x)
            return result

        weight = 1.0 + rank
        total = sum(1.0 + r for r in range(world))
        x = leaf(3)
        assert gradient((functional.all_reduce(x) * weight).sum(), x).tolist() == [total] * 3
        outputs = functional.all_gather(x)
        assert gradient((outputs[1] * weight).sum(), x)[0] == (total if rank == 1 else 0)
        assert gradient((functional.broadcast(x, 1) * weight).sum(), x)[0] == (
            total if rank == 1 else 0
        )
        assert gradient((functional.reduce(x, 1) * weight).sum(), x)[0] == 2.0
        parts = [leaf(3) for _ in range(world)]
        scattered = functional.reduce_scatter(torch.zeros(3, dtype=torch.float64), parts)
        assert gradient((scattered * weight).sum(), parts[1])[0] == 2.0
        received = functional.all_to_all([torch.zeros_like(x) for _ in parts], parts)
        assert gradient((received[0] * weight).sum(), parts[1])[0] == (2.0 if rank == 0 else 0)
        y = leaf(world)
        exchanged = functional.all_to_all_single(torch.zeros_like(y), y)
        assert gradient(exchanged.sum() * weight, y).tolist() == [1.0 + r for r in range(world)]
        gathered = functional.gather(x, 0)
        whole = torch.stack(list(gathered)).sum()
        assert gradient(whole * weight, x)[0] == (1.0 if world > 1 else weight)
        sent = functional.scatter(parts, 0)
        assert gradient((sent * weight).sum(), parts[1])[0] == (2.0 if rank == 0 else 0)

    play(body, shape)


# -- objects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["A", "AA", "AAB"])
def test_objects(play: Play, shape: str) -> None:
    def thing(rank: int) -> dict[str, Any]:
        return {"rank": rank, "text": "x" * (1000 * rank), "tensor": [rank] * rank}

    def body(rank: int, world: int) -> None:
        last = world - 1
        got: list[Any] = [None] * world
        dist.all_gather_object(got, thing(rank))
        assert got == [thing(r) for r in range(world)]
        some = [thing(9), None, "three"] if rank == last else [None] * 3
        dist.broadcast_object_list(some, last)
        assert some == [thing(9), None, "three"]
        gathered: list[Any] | None = [None] * world if rank == last else None
        dist.gather_object(thing(rank), gathered, last)
        assert gathered == ([thing(r) for r in range(world)] if rank == last else None)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [thing(r) for r in range(world)] if rank == 0 else None, 0)
        assert mine == [thing(rank)]
        dist.barrier()

    play(body, shape)
