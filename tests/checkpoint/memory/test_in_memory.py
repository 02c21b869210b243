"""A manager with the memory tier: what comes back after kills, and that storage goes on alone without it."""

import os
import select
import shutil
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.conftest import Machine
from tests.conftest import Gang, StartGang
from tests.waiting import LIMIT_S

from fireflyer.checkpoint import CheckpointManager, InMemory, Shard
from fireflyer.checkpoint.memory.inventory import Stamp
from fireflyer.checkpoint.memory.keeper_link import KeeperLink
from fireflyer.checkpoint.memory.memfd import Memory
from fireflyer.checkpoint.save.staging import Stager
from fireflyer.errors import CheckpointError, NoSpace, StorageError
from fireflyer.storage import Chunk, DirectoryStorage

Differences = Callable[[Any, Any], list[str]]
Body = Callable[[int, int], Any]
Job = Callable[..., Gang]
ROWS, COLUMNS = 60, 5000


class StuckStorage(DirectoryStorage):
    """Takes nothing of one step: a save of it never ends."""

    def __init__(self, root: Path, stuck: str) -> None:
        super().__init__(root)
        self._stuck = stuck

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        if name.startswith(self._stuck):
            threading.Event().wait()
        super().write(name, chunks)


def whole_of(step: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(step))


def state_of(step: int, rank: int, world: int) -> dict[str, Any]:
    """One tensor cut by rows over the ranks, one that all have."""
    share = ROWS // world
    rows = whole_of(step)[rank * share : (rank + 1) * share].contiguous()
    box = Shard(rows, (ROWS, COLUMNS), (rank * share, 0))
    return {"sharded": box, "same": torch.full((7,), float(step)), "step": step}


@pytest.fixture
def job(machine: Machine, start_gang: StartGang, tmp_path: Path) -> Job:
    """job(body, world, nodes): ranks of one gloo group, spread over virtual nodes."""

    def run(body: Body, world: int, nodes: int) -> Gang:
        store = f"file://{machine.store()}"

        def ranked(rank: int, world: int) -> Any:
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
            return body(rank, world)

        return start_gang(ranked, world, nodes)

    return run


def die_with_a_save_in_memory_alone(place: Path, **options: Any) -> Body:
    """Saves step 10, then step 20, which never reaches the storage; then kill -9."""

    def body(rank: int, world: int) -> None:
        storage = StuckStorage(place, "step-000000000020/data")
        manager = CheckpointManager(storage, memory=True, **options)
        assert manager.latest() is None
        first = manager.save(10, state_of(10, rank, world), per_rank={"rank": rank})
        first.wait()
        assert first.in_memory
        last = manager.save(20, state_of(20, rank, world), per_rank={"rank": 20 + rank})
        assert last.wait_in_memory()
        assert not last.done
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    return body


@pytest.mark.sample(1)
@pytest.mark.parametrize("lost", ["n0", "n1", None])
@pytest.mark.parametrize("world", [4, 2])
def test_a_lost_node_costs_nothing_that_was_in_memory(
    job: Job, machine: Machine, tmp_path: Path, differences: Differences, lost: str, world: int
) -> None:
    place = tmp_path / "c"
    job(die_with_a_save_in_memory_alone(place), 4, 2).results()
    assert not list(place.glob("step-000000000020/manifest-*"))
    if lost is not None:
        machine.kill_keeper(lost)

    def again(rank: int, world: int) -> list[Any]:
        manager = CheckpointManager(place, memory=True)
        seen: list[Any] = [manager.latest(), manager.steps()]
        target = state_of(7, rank, world)
        loaded = manager.load(into=target)
        seen.append(
            differences(loaded["sharded"].local, state_of(20, rank, world)["sharded"].local)
        )
        seen += [loaded["step"], loaded["same"].tolist(), manager.loaded_per_rank()]
        tensors = manager.load_tensors("sharded")
        seen.append(differences(tensors, {"sharded": whole_of(20)}))
        seen.append(manager.load(step=10)["step"])
        handle = manager.save(30, state_of(30, rank, world))
        handle.wait()
        seen += [handle.in_memory, manager.steps(), manager.load()["step"]]
        return seen

    for rank, seen in enumerate(job(again, world, 2).results()):
        own = {"rank": 20 + rank}
        expected = [20, [10, 20], [], 20, [20.0] * 7, own, [], 10, True, [10, 30], 30]
        assert seen == expected


def test_one_process_survives_its_own_kill(
    machine: Machine, tmp_path: Path, forked: Callable[..., list[int]], differences: Differences
) -> None:
    def victim() -> None:
        manager = CheckpointManager(StuckStorage(tmp_path / "c", "step-000000000002"), memory=True)
        manager.save(1, {"w": whole_of(1)}).wait()
        assert manager.save(2, {"w": whole_of(2)}, per_rank={"n": 2}).wait_in_memory()
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(victim) == [-signal.SIGKILL]
    manager = CheckpointManager(tmp_path / "c", memory=True)
    assert differences(manager.load(), {"w": whole_of(2)}) == []
    assert manager.loaded_per_rank() == {"n": 2}
    assert CheckpointManager(tmp_path / "c").latest() == 1, (
        "without memory=True it is not looked at"
    )


def test_a_removed_directory_is_not_remembered(machine: Machine, tmp_path: Path) -> None:
    place = tmp_path / "c"
    handle = CheckpointManager(place, memory=True).save(5, {"w": whole_of(5)})
    handle.wait()
    assert handle.in_memory
    shutil.rmtree(place)
    manager = CheckpointManager(place, memory=True)
    assert manager.latest() is None
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        manager.load()
    manager.save(1, {"w": whole_of(1)}).wait()
    manager = CheckpointManager(place, memory=True)
    assert manager.steps() == [1]


def test_damage_in_memory_is_found_and_storage_serves(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def body(rank: int, world: int) -> list[Any]:
        manager = CheckpointManager(tmp_path / "c", memory=True)
        if rank == 1:
            filled = Memory.filled

            def flipped(chunks: Iterable[bytes | memoryview]) -> Memory:
                data = bytearray(b"".join(chunks))
                data[len(data) // 2] ^= 4
                return filled([bytes(data)])

            monkeypatch.setattr(Memory, "filled", flipped)
        monkeypatch.setattr(
            "fireflyer.checkpoint.save.committer.blocks_of", lambda _: []
        )  # unseen on arrival
        handle = manager.save(1, state_of(1, rank, world))
        handle.wait()
        seen = [handle.in_memory]
        for _ in range(2):
            caplog.clear()
            loaded = manager.load()
            seen.append(torch.equal(loaded["sharded"], whole_of(1)))
            texts = [record.getMessage() for record in caplog.records]
            seen += [any("dropping it from memory" in text for text in texts)]
        return [*seen, manager.steps()]

    first, second = job(body, 2, 2).results()
    # Both ranks read the whole tensor, so rank 0 is the first to have found it.
    assert first == [True, True, True, True, False, [1]]
    assert second == [True, True, False, True, False, [1]]
    assert not (tmp_path / "c" / "damaged").exists()


def test_a_lost_keeper_is_replaced_at_the_next_save(
    job: Job, machine: Machine, tmp_path: Path
) -> None:
    def body(rank: int, world: int) -> list[Any]:
        manager = CheckpointManager(tmp_path / "c", memory=InMemory(deadline_s=1.0))
        seen = []
        for step in (1, 2, 3):
            handle = manager.save(step, state_of(step, rank, world))
            handle.wait()
            seen.append(handle.wait_in_memory())
            dist.barrier()
            if step == 1 and rank == 0:
                machine.kill_keeper("n1")
            dist.barrier()
        return [*seen, manager.steps()]

    assert job(body, 2, 2).results() == [[True, False, True, [1, 2, 3]]] * 2


def test_a_keeper_that_hangs_is_waited_for_once(
    job: Job,
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where the ranks wait for each other for less than a minute: none is told of a failed save."""
    puts: list[int] = []
    put = KeeperLink.put

    def counted(link: KeeperLink, stamp: Stamp, *rest: Any) -> None:
        puts.append(stamp.step)
        put(link, stamp, *rest)

    def body(rank: int, world: int) -> list[Any]:
        monkeypatch.setattr(KeeperLink, "put", counted)
        memory = InMemory(deadline_s=2.0)
        manager = CheckpointManager(tmp_path / "c", memory=memory, commit_deadline_s=20)
        seen, pid = [], 0
        for step in range(1, 6):
            dist.barrier()
            if step == 2 and rank == 0:
                pid = machine.stop_keeper("n1")
            if step == 5:
                if rank == 0:
                    os.kill(pid, signal.SIGCONT)
                assert manager._copies is not None
                assert manager._copies._tier is not None
                for probe in manager._copies._tier._unresponsive.values():
                    assert probe._sock is not None
                    assert select.select([probe._sock], [], [], LIMIT_S)[0]
            dist.barrier()
            handle = manager.save(step, state_of(step, rank, world))
            handle.wait()
            seen.append(handle.wait_in_memory())
        warnings = [r for r in caplog.records if "storage continue" in r.getMessage()]
        return [*seen, manager.steps(), {3, 4} & set(puts), len(warnings)]

    expected = [True, False, False, False, True, [1, 2, 3, 4, 5], set()]
    assert job(body, 3, 3).results() == [[*expected, int(rank == 0)] for rank in range(3)]


def test_a_load_does_not_hang_on_a_keeper(job: Job, machine: Machine, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[Any]:
        memory = InMemory(deadline_s=2.0)
        manager = CheckpointManager(tmp_path / "c", memory=memory, commit_deadline_s=20)
        manager.save(1, state_of(1, rank, world)).wait()
        dist.barrier()
        if rank == 0:
            machine.stop_keeper("n1")
        dist.barrier()
        return [manager.load()["step"] for _ in range(2)]

    assert job(body, 2, 2).results() == [[1, 1]] * 2


def test_a_rank_that_cannot_stage_lets_the_others_know(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int, world: int) -> list[Any]:
        manager = CheckpointManager(tmp_path / "c", memory=True)
        if rank == 1:

            def no_room(*_: object, **__: object) -> None:
                raise NoSpace("no room")

            with monkeypatch.context() as patch:
                patch.setattr(Stager, "stage", no_room)
                with pytest.raises(NoSpace):
                    manager.save(1, state_of(1, rank, world))
        else:
            handle = manager.save(1, state_of(1, rank, world))
            with pytest.raises(CheckpointError, match="rank 1 could not save its part: NoSpace"):
                handle.wait()
            assert not handle.in_memory
        handle = manager.save(2, state_of(2, rank, world))
        handle.wait()
        return [handle.in_memory, manager.steps()]

    assert job(body, 2, 2).results() == [[True, [2]]] * 2


def test_what_rank_0_cannot_read_fails_the_constructor_on_all(job: Job, tmp_path: Path) -> None:
    class Unreadable(DirectoryStorage):
        def list(self, name: str = "") -> list[str]:
            raise StorageError(f"{name} cannot be read")

    def body(rank: int, world: int) -> str:
        storage = (Unreadable if rank == 0 else DirectoryStorage)(tmp_path / "c")
        with pytest.raises((StorageError, CheckpointError)) as caught:
            CheckpointManager(storage, memory=True)
        return str(caught.value)

    first, second = job(body, 2, 1).results()
    assert first == "claims cannot be read"
    assert second == "rank 0 cannot use the directory: claims cannot be read"


def test_without_room_storage_goes_on_alone(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path / "c", memory=InMemory(limit_bytes=1000))
    for step in (1, 2):
        handle = manager.save(step, {"w": whole_of(step)})
        handle.wait()
        assert not handle.in_memory
        assert not handle.wait_in_memory()
    assert manager.steps() == [1, 2]
    assert len([r for r in caplog.records if "limit of 1000 bytes" in r.getMessage()]) == 1


def test_without_the_tier_nothing_is_in_memory(tmp_path: Path) -> None:
    handle = CheckpointManager(tmp_path).save(1, {"w": whole_of(1)})
    assert not handle.wait_in_memory()
    handle.wait()
    assert not handle.in_memory


def test_an_incremental_save_is_whole_in_memory(
    machine: Machine, tmp_path: Path, differences: Differences
) -> None:
    state = {"still": whole_of(1), "moving": whole_of(2)}
    manager = CheckpointManager(tmp_path / "c", memory=True, incremental=True)
    manager.save(1, state).wait()
    state["moving"][3] += 1
    manager.save(2, state).wait()
    sizes = [path.stat().st_size for path in sorted((tmp_path / "c").glob("step-*/data-*"))]
    assert sizes[1] < sizes[0]
    for data in (tmp_path / "c").glob("step-*/data-*"):
        data.unlink()
    assert differences(CheckpointManager(tmp_path / "c", memory=True).load(), state) == []


def test_what_changed_under_the_copy_is_not_kept(machine: Machine, tmp_path: Path) -> None:
    state = {"w": whole_of(1)}
    manager = CheckpointManager(tmp_path / "c", memory=True, overlap=True)
    handle = manager.save(1, state)
    state["w"].add_(1)
    with pytest.raises(CheckpointError, match="w changed while it was copied"):
        handle.wait()
    assert not handle.in_memory
    assert CheckpointManager(tmp_path / "c", memory=True).latest() is None


def test_a_replaced_run_keeps_nothing_in_memory(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differences: Differences
) -> None:
    monkeypatch.setenv("FIREFLYER_TASK", "t")
    monkeypatch.setenv("FIREFLYER_ATTEMPT", "1")
    zombie = CheckpointManager(tmp_path / "c", memory=True)
    zombie.save(1, {"w": whole_of(1)}).wait()
    monkeypatch.setenv("FIREFLYER_ATTEMPT", "2")
    manager = CheckpointManager(tmp_path / "c", memory=True)
    late = zombie.save(2, {"w": whole_of(2)})
    with pytest.raises(CheckpointError, match="belongs to attempt 2"):
        late.wait()
    assert not late.in_memory
    assert differences(manager.load(), {"w": whole_of(1)}) == []
    handle = manager.save(3, {"w": whole_of(3)})
    handle.wait()
    assert handle.in_memory


def test_a_forked_child_has_a_tier_of_its_own(
    machine: Machine, tmp_path: Path, forked: Callable[..., list[int]]
) -> None:
    manager = CheckpointManager(tmp_path / "c", memory=True)
    manager.save(1, {"w": whole_of(1)}).wait()

    def child() -> None:
        assert torch.equal(manager.load()["w"], whole_of(1))

    assert forked(child, child) == [0, 0]
    handle = manager.save(2, {"w": whole_of(2)})
    handle.wait()
    assert handle.in_memory
