"""Members that change: what a part that was left behind still saves never counts, and the others go on."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.conftest import untidy

import fireflyer.hfreduce as hfreduce
from fireflyer.checkpoint import CheckpointManager, InMemory, Shard
from fireflyer.checkpoint.directory.claims import Claims
from fireflyer.checkpoint.directory.manifest import Claim
from fireflyer.checkpoint.schedule import Run
from fireflyer.clock import ManualClock
from fireflyer.errors import CheckpointError, CollectiveError
from fireflyer.storage import DirectoryStorage, Storage

Differences = Callable[[Any, Any], list[str]]
Told = Callable[[Storage, Callable[[str, str], None]], Storage]
Make = Callable[..., CheckpointManager]
StartGang = Callable[..., Any]
MINUTE = timedelta(seconds=60)
ROWS = 12


def state_of(who: str, step: int) -> dict[str, Any]:
    return {"w": torch.full((50,), float(step)), "who": who, "step": step}


# -- one process a part ------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Constructs the manager of a rank 0 of an attempt of task t1."""

    def make(attempt: int = 1, place: Storage | None = None, **options: Any) -> CheckpointManager:
        monkeypatch.setenv("FIREFLYER_TASK", "t1")
        monkeypatch.setenv("FIREFLYER_ATTEMPT", str(attempt))
        return CheckpointManager(tmp_path if place is None else place, **options)

    return make


def test_a_part_left_behind_cannot_commit(make: Make, differences: Differences) -> None:
    behind = make()
    behind.save(10, state_of("all", 10)).wait()
    part = make()
    part.fence(1)
    handle = behind.save(20, state_of("behind", 20))
    with pytest.raises(
        CheckpointError,
        match=r"belongs to generation 1 of attempt 1 of task t1, .* this run \(attempt 1 of task t1\)",
    ):
        handle.wait()
    assert differences(part.load(), state_of("all", 10)) == []
    part.save(15, state_of("part", 15)).wait()
    assert part.steps() == [10, 15]
    assert part.latest() == 15


def test_one_that_has_not_saved_before_came_too_late(make: Make, tmp_path: Path) -> None:
    part = make()
    part.save(1, state_of("all", 1)).wait()
    behind = make()  # of a rank that is the first of its part only now
    part.fence(2)
    with pytest.raises(CheckpointError, match=r"belongs to generation 2 of .* is older"):
        behind.save(2, state_of("behind", 2))
    names = sorted(path.name for path in (tmp_path / "claims").iterdir())
    assert names[:2] == ["000001.json", "000002.json"]
    assert [name[:21] for name in names[2:]] == ["attempt-000001-000002", *[names[3][:21]]]
    with pytest.raises(CheckpointError, match=r"generation 1 of attempt 1 .* is older"):
        behind.fence(1)
    behind.fence(3)
    with pytest.raises(CheckpointError, match="belongs to generation 3 of attempt 1"):
        part.save(3, state_of("part", 3)).wait()


def test_generations_sort_below_the_next_attempt(make: Make) -> None:
    part = make(attempt=1)
    part.fence(7)
    part.save(1, state_of("part", 1)).wait()
    again = make(attempt=2)
    with pytest.raises(
        CheckpointError, match=r"belongs to attempt 2 .* \(generation 7 of attempt 1"
    ):
        part.save(2, state_of("part", 2)).wait()
    with pytest.raises(CheckpointError, match=r"belongs to attempt 2 .* generation 8 .* is older"):
        part.fence(8)
    again.save(3, state_of("again", 3)).wait()
    again.fence(1)
    again.save(4, state_of("again", 4)).wait()
    assert again.steps() == [1, 3, 4]


def test_a_newcomer_alone_does_not_take_over(make: Make) -> None:
    part = make()
    part.fence(1)
    newcomer = make()  # started again, so it says generation 0
    assert newcomer.latest() is None
    part.save(1, state_of("part", 1)).wait()


@pytest.mark.parametrize("generation", [0, 3, 2])
def test_a_generation_comes_after_the_one_before(make: Make, generation: int) -> None:
    part = make()
    part.fence(3)
    with pytest.raises(ValueError, match=f"generation {generation} is not newer than 3"):
        part.fence(generation)
    part.save(1, state_of("part", 1)).wait()


@pytest.mark.parametrize("claims_by_it", [False, True])
def test_a_part_frozen_anywhere_in_its_save(
    make: Make, ram: Path, told: Told, differences: Differences, claims_by_it: bool
) -> None:
    """For every storage call of a save of step 20: its part freezes before it, the other one fences and saves
    steps 20 and 15, it thaws and ends its save. Its rank 0 may be another since then, which has to claim."""
    frozen_at, reached, acknowledged = 0, True, 0
    until_frozen: int | None = None
    place = DirectoryStorage(ram)

    def freeze(call: str, name: str) -> None:
        nonlocal until_frozen, reached
        if until_frozen == 0:
            until_frozen, reached = None, True
            part = make(place=place, keep=3)
            part.fence(1)
            part.save(20, state_of("part", 20)).wait()
            part.save(15, state_of("part", 15)).wait()
        elif until_frozen is not None:
            until_frozen -= 1

    while reached:
        place = DirectoryStorage(ram / f"frozen-{frozen_at}")
        until_frozen, reached = None, False
        behind = make(place=told(place, freeze), keep=1)
        behind.save(10, state_of("all", 10)).wait()
        if claims_by_it:
            behind = make(place=told(place, freeze), keep=1)
        until_frozen = frozen_at
        try:
            behind.save(20, state_of("behind", 20)).wait()
            acknowledged += 1
        except CheckpointError as error:
            assert "generation 1 of attempt 1" in str(error)  # noqa: PT017 - either outcome may be right
        until_frozen = None
        later = make(attempt=2, place=place)
        if reached:
            assert later.latest() == 15, f"frozen before call {frozen_at}"
            assert differences(later.load(), state_of("part", 15)) == []
            assert differences(later.load(20), state_of("part", 20)) == []
        assert not (place.root / "damaged").exists()
        frozen_at += 1
    assert frozen_at > 8
    assert 1 < acknowledged < frozen_at - 3


def test_an_attempt_is_one_run_whatever_its_members(tmp_path: Path) -> None:
    storage, now = DirectoryStorage(tmp_path), 1000.0

    def claims(attempt: int) -> Claims:
        return Claims(storage, Claim(task="t1", attempt=attempt), lambda: now)

    first = claims(1)
    first.take()
    for generation in (1, 2):
        now += 100.0
        first.fence(generation)
        first.take()
    assert first.history() == [Run(1000.0, None)]
    first.leave()
    now = 2000.0
    second = claims(2)
    second.take()
    assert second.history() == [Run(1000.0, 1200.0), Run(2000.0, None)]


# -- several ranks -----------------------------------------------------------------------------------


def begin(rank: int, world: int, folder: Path) -> Any:
    os.environ.update(FIREFLYER_TASK="t1", FIREFLYER_ATTEMPT="1", FIREFLYER_SECRET="of this job")
    store = dist.FileStore(str(folder / "rendezvous"), world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world, timeout=MINUTE)
    return dist.group.WORLD


def tell(folder: Path, what: str) -> None:
    dist.FileStore(str(folder / "told"), -1).set(what, "so")


def hear(folder: Path, *what: str) -> None:
    """Returns when all of it was told."""
    store = dist.FileStore(str(folder / "told"), -1)
    for one in what:
        store.get(one)


def lose_members(group: Any, quorum: int) -> None:
    with pytest.raises(CollectiveError):
        reduce_for_ever()
    group.reform(MINUTE, quorum=quorum)


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(10))


def rows_of(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 3, dtype=torch.float64).view(ROWS, 3) * step


def mine(step: int, group: Any) -> dict[str, Any]:
    """This rank's share of `rows_of(step)`, and what all have."""
    rank, each = group.rank(), ROWS // group.size()
    local = rows_of(step)[rank * each : (rank + 1) * each].clone()
    return {"rows": Shard(local, (ROWS, 3), (rank * each, 0)), "step": step}


def check_rows(manager: CheckpointManager, step: int, group: Any) -> None:
    whole = manager.load()
    assert (whole["step"], torch.equal(whole["rows"], rows_of(step))) == (step, True)
    into = mine(0, group)
    manager.load(into=into)
    assert torch.equal(into["rows"].local, mine(step, group)["rows"].local)


@pytest.mark.parametrize("frozen_before", ["list claims", "write step-000000000002/manifest"])
def test_two_of_four_ranks_are_lost_in_a_save(
    start_gang: StartGang, told: Told, tmp_path: Path, frozen_before: str
) -> None:
    """Rank 3 is killed, rank 0 freezes on its way to the commit of step 2 and keeps its manager; ranks 1 and
    2 go on, save step 3, and let rank 0 end its save."""
    armed = False
    place = DirectoryStorage(tmp_path / "c")
    out = [f"{rank} is out of the save" for rank in range(4)]

    def before(rank: int, call: str, name: str) -> None:
        nonlocal armed
        if not armed:
            return
        if rank == 3 and name.startswith("step-000000000002/done"):
            hear(tmp_path, *out)
            os.kill(os.getpid(), 9)
        if rank == 0 and f"{call} {name}".startswith(frozen_before):
            armed = False
            tell(tmp_path, "frozen")
            hear(tmp_path, "step 3 is saved")

    def left_behind(manager: CheckpointManager, handle: Any) -> None:
        hear(tmp_path, "frozen")
        dist.destroy_process_group()
        with pytest.raises(CheckpointError, match="belongs to generation 1 of attempt 1"):
            handle.wait()
        with pytest.raises(CheckpointError, match="belongs to generation 1 of attempt 1"):
            manager.save(9, {"rows": rows_of(9), "step": 9}).wait()
        assert manager.latest() == 3

    def body(rank: int, world: int) -> Any:
        nonlocal armed
        group = begin(rank, world, tmp_path)
        manager = CheckpointManager(
            told(place, lambda call, name: before(rank, call, name)),
            incremental=True,
            should_suspend=lambda: False,
        )
        manager.save(1, mine(1, group), per_rank={"rank": rank}).wait()
        assert not manager.should_save(1)
        dist.barrier()
        armed = True
        handle = manager.save(2, mine(2, group))
        tell(tmp_path, out[rank])
        if rank == 0:
            return left_behind(manager, handle)
        lose_members(group, quorum=2)
        armed = False
        manager.fence(1)
        with pytest.raises(CheckpointError, match="abandoned: the members of the job have changed"):
            handle.wait()
        assert not manager.should_save(2)
        check_rows(manager, 1, group)
        assert manager.loaded_per_rank() == {"rank": group.rank()}
        manager.save(3, mine(3, group)).wait()
        dist.barrier()
        if group.rank() == 0:
            assert untidy(place.root) == []
            tell(tmp_path, "step 3 is saved")
        check_rows(manager, 3, group)
        return rank, group.rank(), manager.steps()

    results = start_gang(body, 4).results()
    assert results == [None, (1, 0, [1, 3]), (2, 1, [1, 3]), None]
    assert CheckpointManager(place).latest() == 3


def join(folder: Path) -> Any:
    """Becomes a member of the running job; its group is torch's default group."""
    address = dist.FileStore(str(folder / "told"), -1).get("door").decode()
    group = hfreduce.ProcessGroupHFReduce.join([address], MINUTE)
    dist.distributed_c10d._update_default_pg(group)
    return group


def test_a_newcomer_takes_part_after_the_fence(
    start_gang: StartGang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group has four ranks again, and none knows it by their number: all make their plans anew."""
    monkeypatch.setenv("FIREFLYER_SECRET", "of this job")

    def newcomer() -> Any:
        os.environ.update(
            FIREFLYER_TASK="t1", FIREFLYER_ATTEMPT="1", FIREFLYER_JOIN="told by a store"
        )
        group = join(tmp_path)
        return group, CheckpointManager(tmp_path / "c", every="10min", clock=ManualClock())

    def body(rank: int, world: int) -> Any:
        if rank == 4:
            group, manager = newcomer()
        else:
            group = begin(rank, 4, tmp_path)
            clock = ManualClock()
            manager = CheckpointManager(tmp_path / "c", every="10min", clock=clock)
            for step in (1, 2):  # the second time they agree to ask one another again at step 301
                clock.advance(1.0)
                assert not manager.should_save(step)
            manager.save(1, mine(1, group)).wait()
            dist.barrier()
            if rank == 3:
                dist.FileStore(str(tmp_path / "told"), -1).set("door", group.join_address)
            tell(tmp_path, f"{rank} is here")
            if rank == 0:
                hear(tmp_path, *(f"{other} is here" for other in range(4)))
                os.kill(os.getpid(), 9)
            lose_members(group, quorum=3)
        while group.size() < 4:
            group.reform(MINUTE)
        manager.fence(2)
        assert not manager.should_save(3), "all ask one another at once, the newcomer too"
        check_rows(manager, 1, group)
        manager.save(2, mine(2, group)).wait()
        check_rows(manager, 2, group)
        dist.barrier()
        if rank == 4:
            dist.distributed_c10d._update_default_pg(None)
            group.shutdown()
        return group.rank()

    gang = start_gang(body, 5, nodes=5)
    assert [gang.result(rank) for rank in (1, 2, 3, 4)] == [0, 1, 2, 3]


@pytest.mark.usefixtures("machine")
def test_a_save_in_memory_is_given_up_and_the_next_one_is_there(
    start_gang: StartGang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 3 ends before it replicates; nobody waits for it longer than until the fence."""

    def body(rank: int, world: int) -> Any:
        group = begin(rank, world, tmp_path)
        options = InMemory(linger_s=0.0)
        manager = CheckpointManager(tmp_path / "c", memory=options)
        assert manager.save(1, mine(1, group)).wait_in_memory()
        manager.wait()
        dist.barrier()
        if rank == 3:
            monkeypatch.setattr(manager._copies, "replicate", lambda *_: hear(tmp_path, "never"))
        handle = manager.save(2, mine(2, group))
        tell(tmp_path, f"{rank} is out of the save")
        if rank == 3:
            hear(tmp_path, *(f"{other} is out of the save" for other in range(4)))
            os.kill(os.getpid(), 9)
        lose_members(group, quorum=3)
        manager.fence(1)
        with pytest.raises(CheckpointError):
            handle.wait()
        assert not handle.in_memory
        check_rows(manager, 1, group)
        handle = manager.save(3, mine(3, group))
        assert handle.wait_in_memory()
        handle.wait()
        check_rows(manager, 3, group)
        dist.barrier()
        return group.rank()

    results = start_gang(body, 4, nodes=2).results()
    assert results == [0, 1, 2, None]


def test_who_waits_for_a_save_does_not_wait_for_a_rank_that_is_lost(
    start_gang: StartGang, told: Told, tmp_path: Path
) -> None:
    place = DirectoryStorage(tmp_path / "c")

    def before(rank: int, call: str, name: str) -> None:
        if rank == 2 and call == "write" and name.startswith("step-000000000001/part"):
            hear(tmp_path, *(f"{other} is out of the save" for other in range(3)))
            os.kill(os.getpid(), 9)

    def body(rank: int, world: int) -> Any:
        group = begin(rank, world, tmp_path)
        manager = CheckpointManager(told(place, lambda call, name: before(rank, call, name)))
        manager.save(1, mine(1, group))
        tell(tmp_path, f"{rank} is out of the save")
        with pytest.raises(CheckpointError, match="abandoned: the members of the job have changed"):
            manager.wait()
        lose_members(group, quorum=2)
        manager.fence(1)
        manager.save(2, mine(2, group)).wait()
        check_rows(manager, 2, group)
        dist.barrier()
        return group.rank(), manager.steps()

    assert start_gang(body, 3).results() == [(0, [2]), (1, [2]), None]
