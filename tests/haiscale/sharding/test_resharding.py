"""A sharded model goes on over other ranks, from memory: nothing of it changes on the way."""

import datetime
import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import: once here, not in each forked rank
import torch.distributed as dist
from tests.haiscale.sharding.test_fsdp import BLOCKS, LENGTH, WORDS, Model, differences, init
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CollectiveError, ConfigError, ShardsLost
from fireflyer.haiscale.fsdp import FullyShardedDataParallel, hybrid_mesh
from fireflyer.haiscale.sharding.redistribute import Claim, Mover, Part, Plan, rows_of

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True)
MINUTE = datetime.timedelta(seconds=60)
BATCH = 12
BEFORE, AFTER = 3, 2


def batch(step: int, rank: int = 0, world: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)[rank::world]


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Training:
    """A model and an optimizer of which some time is spent on each of several groups."""

    def __init__(self, defers: bool, **options: Any) -> None:
        joins = options.get("joins", False)
        self.core = Model(9 if joins else 0).double()
        if not options.pop("never", True):
            del self.core.never  # what was never stepped has no moments
        self.model = FullyShardedDataParallel(
            self.core, optimizer=ADAMW if defers else None, auto_wrap_policy=BLOCKS, **options
        )
        self.optimizer = self.model.optimizer or ADAMW([*self.model.parameters()])
        self.own = [] if defers else [self.optimizer]
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)

    def train(self, steps: range, group: dist.ProcessGroup | None = None) -> None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        for step in steps:
            self.core.calls = step
            self.optimizer.zero_grad()
            loss_of(self.model, batch(step, rank, world)).backward()
            self.optimizer.step()
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        """All of it, whole."""
        found = {n: t.clone().numpy() for n, t in self.model.state_dict(full=True).items()}
        names = {id(p): name for name, p in self.core.named_parameters()}
        twice = self.parameters()[0].detach() * 2  # DTensor remembers where such results lie
        found["twice"] = twice.full_tensor().clone().numpy()
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{names[id(parameter)]}: {key}"] = whole.clone().numpy()
        found["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"]).numpy()
        return found

    def parameters(self) -> list[Any]:
        return [*self.model.parameters()]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all((left[k] == right[k]).all() for k in left)


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    model = Model().double()
    optimizer = ADAMW([*model.parameters()])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for step in range(BEFORE + AFTER):
        model.calls = step
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
        schedule.step()
    return model


def wrong(found: dict[str, Any], reference: nn.Module) -> dict[str, float]:
    all_of_it = {**{name: t.numpy() for name, t in reference.state_dict().items()}, **found}
    return {name: d for name, d in differences(all_of_it, reference).items() if not d <= 1e-10}


MODES = [
    pytest.param(way, reshard, id=f"{'deferred' if way else 'synchronous'} {reshard}")
    for way, reshard in ((True, True), (False, False))
]


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(("defers", "zero3"), MODES)
def test_through_several_layouts(
    start_gang: Callable[..., Any],
    store_path: str,
    reference: nn.Module,
    defers: bool,
    zero3: bool,
) -> None:
    """4 ranks with replicas -> 2 of them -> 4, two of which come new -> 3."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        group = {n: dist.new_group([*range(n)], backend="hfreduce") for n in (2, 3)}
        training = Training(defers, mesh=hybrid_mesh(), reshard_after_forward=zero3)
        kept = [training.model, training.optimizer, *training.parameters()]
        training.train(range(1))
        before = training.state()
        if rank < 2:
            moved = training.model.reshard(group[2], steps=1, optimizers=training.own)
            assert moved.received == 0, "every rank had its part"
            assert training.model._layout.mesh.shape == (2,)
            assert same(training.state(), before)
            training.train(range(1, 2), group[2])
            before = training.state()
        else:
            training = Training(defers, joins=True, reshard_after_forward=zero3)
            with pytest.raises(ConfigError, match="joins"):
                training.model(batch(0)[:, :-1])
            kept = [training.model, training.optimizer, *training.parameters()]
            assert all(p.to_local().numel() == 0 for p in training.parameters())
        moved = training.model.reshard(steps=2, optimizers=training.own)
        assert moved.steps == 2
        assert training.model._layout.mesh.shape == (2, 2), "as wished at first"
        after = training.state()
        assert rank >= 2 or same(after, before)
        training.schedule.last_epoch = 2
        training.train(range(2, 3))
        before = training.state()
        if rank == 3:
            return None
        training.model.reshard(group[3], steps=3, optimizers=training.own)
        assert same(training.state(), before)
        training.train(range(3, BEFORE + AFTER), group[3])
        now = [training.model, training.optimizer, *training.parameters()]
        assert all(a is b for a, b in zip(kept, now, strict=True))
        assert len(training.optimizer.state) > 10
        return training.state()

    results = start_gang(body, 4, 2).results()
    for found in results[:3]:
        assert wrong(found, reference) == {}
        assert same(found, results[0])


def meet(path: str, rank: int, world: int) -> None:
    """All ranks have come here, beside their groups; once a path."""
    store = dist.FileStore(path, world)
    store.set(str(rank), "here")
    for other in range(world):
        store.get(str(other))


class Fails(torch.autograd.Function):
    """Does something, once, in forward or in the backward there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str, act: Callable[[], None]) -> torch.Tensor:
        ctx.where, ctx.act = where, act
        if where == "forward":
            act()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.where == "backward":
            ctx.act()
        return grad, None, None


def attempt(training: Training, where: str, act: Callable[[], None]) -> None:
    """A step that fails at the second block, before updates; when deferred, some ranks hear of it late."""
    training.core.calls = BEFORE
    hook = training.core.blocks[1].register_forward_pre_hook(
        lambda _, args: (Fails.apply(args[0], where, act), *args[1:])  # type: ignore[no-untyped-call]
    )
    words = batch(BEFORE, dist.get_rank(), dist.get_world_size())
    with pytest.raises(CollectiveError):  # noqa: PT012
        loss_of(training.model, words).backward()
        training.model.settle()
    hook.remove()


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(
    ("defers", "zero3", "where"),
    [
        (True, False, "backward"),
        (False, True, "backward"),
        (False, False, "forward"),
    ],
)
def test_a_step_that_fails_in_the_middle_is_done_again(
    start_gang: Callable[..., Any],
    store_path: str,
    reference: nn.Module,
    defers: bool,
    zero3: bool,
    where: str,
) -> None:
    """The groups of the layout end on rank 3; the others hear of it in a collective."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        training = Training(defers, mesh=hybrid_mesh(), reshard_after_forward=zero3)
        training.train(range(BEFORE))
        before = training.state()
        layout = training.model._layout

        def act() -> None:
            if rank == 3:
                for group in (layout.gather, layout.reduce, layout.replicate):
                    group.abort()  # type: ignore[union-attr]

        attempt(training, where, act)
        assert training.model.discard(), "updates were settled before"
        assert all(p.grad is None for p in training.core.parameters())
        with pytest.raises(ConfigError, match="discarded"):
            training.model(batch(0)[:, :-1])
        moved = training.model.reshard(steps=BEFORE, optimizers=training.own)
        assert moved.received == 0
        assert same(training.state(), before)
        training.train(range(BEFORE, BEFORE + AFTER))
        return training.state()

    for found in start_gang(body, 4, 2).results():
        assert wrong(found, reference) == {}


def lose_a_rank(
    rank: int, training: Training, victims: Sequence[int], where: str, path: str
) -> None:
    """The victims die in the middle of the next step; the survivors form the default group anew."""
    meet(path, rank, 4)
    act = lambda: os.kill(os.getpid(), signal.SIGKILL) if rank in victims else None  # noqa: E731
    attempt(training, where, act)
    training.model.discard()
    default: Any = dist.group.WORLD
    default.reform(MINUTE, quorum=4 - len(victims))


@pytest.mark.full  # the quick test is in elastic/test_elastic_shards.py
@pytest.mark.sample(1, 1)
@pytest.mark.parametrize(("defers", "where"), [(False, "forward"), (True, "backward")])
def test_a_lost_host_whose_shards_have_replicas(
    start_gang: Callable[..., Any],
    store_path: str,
    reference: nn.Module,
    defers: bool,
    where: str,
) -> None:
    """kill -9 of the first host: ranks 2 and 3 become 0 and 1, and have all that is needed."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        training = Training(defers, mesh=hybrid_mesh())
        training.train(range(BEFORE))
        before = training.state()
        lose_a_rank(rank, training, (0, 1), where, store_path + "-met")
        assert (dist.get_rank(), dist.get_world_size()) == (rank - 2, 2)
        moved = training.model.reshard(steps=BEFORE, optimizers=training.own)
        assert (moved.steps, moved.received) == (BEFORE, 0)
        assert same(training.state(), before)
        training.train(range(BEFORE, BEFORE + AFTER))
        return training.state()

    gang = start_gang(body, 4, 2)
    for found in (gang.result(rank) for rank in (2, 3)):
        assert not isinstance(found, BaseException)
        assert wrong(found, reference) == {}


@pytest.mark.full  # the quick test is in elastic/test_elastic_shards.py
def test_lost_shards_come_from_the_newest_checkpoint(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path, reference: nn.Module
) -> None:
    def states(training: Training) -> dict[str, Any]:
        weights, moments = get_state_dict(training.model.module, training.optimizer)
        return {"model": weights, "optimizer": moments}

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        training = Training(defers=True, never=False)
        training.train(range(BEFORE - 1))
        CheckpointManager(tmp_path / "c").save(BEFORE - 1, states(training)).wait()
        training.train(range(BEFORE - 1, BEFORE))
        lose_a_rank(rank, training, (3,), "backward", store_path + "-met")
        with pytest.raises(ShardsLost, match="ranks 3: reshard with values=False") as caught:
            training.model.reshard(steps=BEFORE, optimizers=training.own)
        training.model.reshard(values=False, optimizers=training.own)
        assert training.model.state_dict()["words.weight"].to_local().isnan().all()
        assert not training.optimizer.state
        into = states(training)
        assert CheckpointManager(tmp_path / "c").load(into=into, rest=False) is not None
        weights, moments = into["model"], into["optimizer"]
        set_state_dict(
            training.model.module,
            training.optimizer,
            model_state_dict=weights,
            optim_state_dict=moments,
        )
        training.optimizer.param_groups[0]["lr"] = 0.01 * 0.95 ** (BEFORE - 1)
        training.train(range(BEFORE - 1, BEFORE + AFTER))
        return caught.value, training.state()

    gang = start_gang(body, 4)
    for error, found in (gang.result(rank) for rank in (0, 1, 2)):
        assert error.ranks == (3,)
        assert "words.weight" in error.parameters
        assert "blocks.0.extra" not in error.parameters, "of 3 rows the last rank of 4 has none"
        assert wrong(found, reference) == {}


def test_a_rank_dies_while_the_model_is_sharded_anew(
    start_gang: Callable[..., Any], store_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others still have what they had, and do it again without it."""

    def body(rank: int, world: int) -> bool:
        init(store_path, rank, world)
        training = Training(False, mesh=hybrid_mesh())
        training.train(range(1))
        before = training.state()
        move, calls = Mover.move, []

        def dying(self: Mover, pieces: Sequence[Any]) -> None:
            calls.append(len(pieces))
            if rank == 3 and len(calls) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            move(self, pieces)

        meet(store_path + "-met", rank, world)
        monkeypatch.setattr(Mover, "move", dying)
        with pytest.raises(CollectiveError):
            training.model.reshard(shards=1, steps=1, optimizers=training.own)
        with pytest.raises(ConfigError, match="failed half way"):
            training.model(batch(0)[:, :-1])
        default: Any = dist.group.WORLD
        default.reform(MINUTE)
        training.model.reshard(steps=1, optimizers=training.own)
        assert same(training.state(), before)
        training.train(range(1, 2))
        return True

    gang = start_gang(body, 4, 2)
    assert [gang.result(rank) for rank in range(4)] == [True, True, True, None]


def test_updates_that_were_lost_under_way(start_gang: Callable[..., Any], store_path: str) -> None:
    """Deferred: units are of different steps then, and count as lost."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        training = Training(True)
        training.train(range(2))
        meet(store_path + "-met", rank, world)
        assert not training.model.discard()
        with pytest.raises(ShardsLost) as caught:
            training.model.reshard(steps=2)
        assert len(caught.value.parameters) == len(training.parameters())
        return caught.value.ranks

    assert start_gang(body, 2).results() == [(0, 1)] * 2


@pytest.mark.full  # the quick test, of a newcomer, is in elastic/test_elastic_shards.py
def test_who_is_behind_gets_all_and_who_is_ahead_gives(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    """One host has done a step more than the other, whose values count no more; and nothing else moves."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        training = Training(False, mesh=hybrid_mesh())
        training.train(range(2))
        before = training.state()
        behind = rank in (0, 1)
        if behind:
            with torch.no_grad():
                for parameter in training.parameters():
                    parameter.to_local().fill_(7)
                for state in training.optimizer.state.values():
                    state["exp_avg"].to_local().fill_(7)
                    state["step"].fill_(1)
            training.core.scale.fill_(7)
            training.optimizer.param_groups[0].update(lr=7.0, betas=(0.5, 0.5))
        moved = training.model.reshard(steps=1 if behind else 2, optimizers=training.own)
        assert moved.steps == 2
        assert same(training.state(), before)
        assert training.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        parts = sum(p.to_local().nbytes for p in training.parameters())
        moments = 0
        for state in training.optimizer.state.values():
            local = [v.to_local() if isinstance(v, DTensor) else v for v in state.values()]
            moments += sum(t.nbytes for t in local)
        expected = parts + moments + training.core.scale.nbytes if behind else 0
        assert moved.received == expected
        return True

    assert start_gang(body, 4, 2).results() == [True] * 4


def test_nothing_of_the_old_layout_stays(start_gang: Callable[..., Any], store_path: str) -> None:
    """Hooks, groups, threads, and the memory of the old parts; a step that was half done, too."""

    def counts(training: Training) -> dict[str, int]:
        hooks = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks")
        loads = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
        return {
            **{
                name: sum(len(getattr(part, name)) for part in training.core.modules())
                for name in (*hooks, *loads)
            },
            "groups": len(dist.distributed_c10d._world.pg_map),
            "threads": threading.active_count(),
        }

    def body(rank: int, world: int) -> bool:
        init(store_path, rank, world)
        training = Training(False)
        training.train(range(1))
        training.model.reshard(optimizers=training.own)
        training.train(range(1, 2))
        at_first = counts(training)
        classes = [type(part) for part in training.core.modules()]
        gc.collect()
        gc.disable()
        for _ in range(3):
            old = [p.to_local() for p in training.parameters()]
            old += [s["exp_avg"].to_local() for s in training.optimizer.state.values()]
            blocks = [StorageWeakRef(t.untyped_storage()) for t in old if t.numel()]
            del old
            loss_of(training.model, batch(2, rank, world))  # whole parameters are left
            training.model.reshard(optimizers=training.own)
            assert all(block.expired() for block in blocks)
            training.train(range(2, 3))
            assert counts(training) == at_first
            assert [type(part) for part in training.core.modules()] == classes
        return True

    assert start_gang(body, 2).results() == [True] * 2


def test_what_is_refused(start_gang: Callable[..., Any], store_path: str) -> None:
    """On all ranks, with nothing changed."""

    def body(rank: int, world: int) -> list[str]:
        init(store_path, rank, world)
        training = Training(False)
        training.train(range(1))
        before = training.state()
        extra = torch.optim.SGD([training.parameters()[rank]], lr=0.1)
        said = []

        def refused(model: FullyShardedDataParallel, **options: Any) -> None:
            with pytest.raises(ConfigError) as caught:
                model.reshard(**options)
            said.append(str(caught.value))

        refused(training.model, shards=3)
        refused(training.model, values=rank == 0)
        refused(training.model, optimizers=[extra])
        with FullyShardedDataParallel.summon_full_params(training.model):
            refused(training.model)
        parts = FullyShardedDataParallel(nn.Linear(4, 4), reshard_after_forward=2)
        refused(parts)
        refused(FullyShardedDataParallel(nn.Linear(2, 2), joins=True))
        with pytest.raises(ConfigError) as caught:
            FullyShardedDataParallel(nn.Linear(2, 2), dist.group.WORLD, joins=True)
        assert "pass the group to reshard" in str(caught.value)
        assert same(training.state(), before)
        training.train(range(1, 2))
        return said

    expected = [
        "shards=3 does not divide",
        "values= must be equal",
        "different param_groups",
        "summon_full_params is open",
        "reshard_after_forward=2",
        "all ranks are new",
    ]
    for said in start_gang(body, 4).results():
        for text, wanted in zip(said, expected, strict=True):
            assert wanted in text


def claims(parts: list[tuple[int, int] | None], steps: list[int | None]) -> list[Claim]:
    return [
        Claim(p and Part(p[0], p[1], [[] for _ in range(p[0])]), n, None, "", "", True)
        for p, n in zip(parts, steps, strict=True)
    ]


def test_each_row_comes_from_one_who_has_it() -> None:
    """Random holders, also of different layouts, as where an earlier reshard() ended half way."""
    draw = random.Random(7)
    complete = lost = 0
    for _ in range(300):
        world = draw.randint(1, 6)
        hosts = [[r for r in range(world) if r % 2 == side] for side in (0, 1)]
        shards = [draw.choice([1, 2, 3, 4]) for _ in range(world)]
        parts = [
            draw.choice([None, (n, draw.randrange(n)), (n, r % n)]) for r, n in enumerate(shards)
        ]
        parts[draw.randrange(world)] = (1, 0) if draw.random() < 0.3 else (4, 2)
        steps = [None if part is None else draw.choice([3, 3, 4]) for part in parts]
        plan = Plan(claims(parts, steps), hosts)
        count, new = draw.randint(1, 13), draw.randint(1, 5)
        held = {
            r: set(range(*rows_of(count, *part)))
            for r, part in enumerate(parts)
            if part is not None and steps[r] == plan.newest
        }
        if set(range(count)) - set().union(*held.values()):
            lost += 1
            with pytest.raises(ShardsLost) as caught:
                plan.check({"w": count})
            assert caught.value.parameters == ("w",)
            continue
        complete += 1
        plan.check({"w": count})
        for rank in range(world):
            wanted = rows_of(count, new, rank % new)
            got: list[int] = []
            for source, (first, end) in plan.deliveries(count, wanted, rank):
                rows = set(range(first, end))
                assert rows <= held[source]
                assert source == rank or first not in held.get(rank, ())
                got += range(first, end)
            assert got == list(range(*wanted))
    assert min(complete, lost) > 50
