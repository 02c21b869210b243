"""Several ranks over gloo: each writes its own, all or none commit, all load the same."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.conftest import SOAK
from tests.waiting import LIMIT_S

from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.directory.claims import Claims
from fireflyer.checkpoint.directory.manifest import Claim
from fireflyer.clock import ManualClock
from fireflyer.errors import CheckpointError, NoSpace
from fireflyer.storage import DirectoryStorage, Storage

Told = Callable[[Storage, Callable[[str, str], None]], Storage]
Job = Callable[[Callable[[int], None]], None]
WORLD = 2


@pytest.fixture
def job(tmp_path: Path, forked: Callable[..., list[int]]) -> Job:
    """Runs `body(rank)` on two ranks; both must return."""

    def rank_body(rank: int, body: Callable[[int], None]) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=WORLD
        )
        body(rank)
        dist.barrier()
        dist.destroy_process_group()

    def run(body: Callable[[int], None]) -> None:
        (tmp_path / "rendezvous").unlink(missing_ok=True)
        assert (
            forked(*(lambda rank=rank: rank_body(rank, body) for rank in range(WORLD)))
            == [0] * WORLD
        )

    return run


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((100,), float(step)), "step": step}


def save(manager: CheckpointManager, rank: int, step: int) -> None:
    manager.save(
        step, state_of(step), per_rank={"rng": torch.full((rank + 1,), step), "rank": rank}
    ).wait()


def test_replicated_and_per_rank_state(job: Job, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c", keep=2)
        for step in (1, 2, 3):
            save(manager, rank, step)
            assert manager.latest() == step, "when wait returns, every rank sees it"
        dist.barrier()
        assert manager.steps() == [2, 3]
        assert manager.load()["w"].tolist() == [3.0] * 100
        own = manager.loaded_per_rank()
        assert own is not None
        assert own["rank"] == rank
        assert own["rng"].tolist() == [3] * (rank + 1)

    job(body)
    directory = tmp_path / "c" / "step-000000000003"
    sizes = {
        path.name.split("-")[0] + path.name[-10:]: path.stat().st_size
        for path in directory.iterdir()
    }
    assert sizes.pop("manifest00003.json") > 0
    assert sizes == {"data-00000.bin": 448 + 8, "data-00001.bin": 16}, (
        "replicated state is written once"
    )
    alone = CheckpointManager(tmp_path / "c")
    assert alone.load()["step"] == 3
    assert (alone.loaded_per_rank() or {})["rank"] == 0


def test_ranks_without_state_of_their_own_still_take_part(job: Job, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c")
        manager.save(1, state_of(1)).wait()
        target = {"w": torch.zeros(100)}
        manager.load(into=target)
        assert target["w"].tolist() == [1.0] * 100

    job(body)
    assert len(list((tmp_path / "c" / "step-000000000001").iterdir())) == 2


@pytest.mark.parametrize("bad", [0, 1])
def test_what_one_rank_gives_wrong_fails_on_all_and_the_next_save_works(
    job: Job, tmp_path: Path, bad: int
) -> None:
    wrong: list[dict[str, Any]] = [
        {"metrics": {"loss": "abc"}},
        {"metrics": {"loss": torch.ones(2)}},
        {"step": True},
        {"step": 1 << 63},
        {"step": -1},
    ]

    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c")
        for step, one in enumerate(wrong, 1):
            arguments = {"step": step, **(one if rank == bad else {})}
            mine = (TypeError, ValueError) if rank == bad else CheckpointError
            with pytest.raises(mine, match=r"step|metric loss"):
                manager.save(**arguments, state=state_of(step))
            manager.save(step, state_of(step), metrics={"loss": 1.0}).wait()
            dist.barrier()
            assert manager.steps() == list(range(1, step + 1))

    job(body)


def test_damage_that_one_rank_sees_makes_all_fall_back(job: Job, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c")
        for step in (1, 2):
            save(manager, rank, step)
        dist.barrier()
        if rank == 0:
            [data] = (tmp_path / "c" / "step-000000000002").glob("data-*-00001.bin")
            data.write_bytes(bytes(16))
        dist.barrier()
        assert manager.load()["step"] == 1
        own = manager.loaded_per_rank()
        assert own is not None
        assert own["rank"] == rank
        assert manager.steps() == [1]

    job(body)
    assert len(list((tmp_path / "c" / "damaged" / "step-000000000002").iterdir())) == 3


def test_what_one_rank_cannot_load_fails_on_all(job: Job, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c")
        with pytest.raises(CheckpointError, match="no good checkpoint"):
            manager.load()
        save(manager, rank, 1)
        message = "cannot load w" if rank == 1 else "rank 1 could not load step 1"
        with pytest.raises(CheckpointError, match=message):
            manager.load(into={"w": torch.zeros(100 - rank)})
        assert manager.load()["step"] == 1

    job(body)


@pytest.mark.parametrize("sweeps", [False, True])
def test_no_rank_acknowledges_what_a_newer_run_has_fenced_off(
    job: Job, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch, sweeps: bool
) -> None:
    """Rank 0 is frozen between its manifest and its second look at the claims, and a newer run claims; it may
    also save and take away what the cut-off save has left."""

    def body(rank: int) -> None:
        monkeypatch.setenv("FIREFLYER_ATTEMPT", "1")
        committed = threading.Event()

        def freeze(call: str, name: str) -> None:
            if "step-000000000002/manifest-" in name and call == "write":
                committed.set()
            elif committed.is_set() and (call, name) == ("list", "claims"):
                committed.clear()
                Claims(place, Claim(task="", attempt=2)).take()
                for part in (tmp_path / "c").glob("step-*2/part-*"):
                    if sweeps:
                        part.unlink()
                threading.Event().wait(0.3)  # the other rank looks some ten times

        place = DirectoryStorage(tmp_path / "c")
        manager = CheckpointManager(told(place, freeze) if rank == 0 else place)
        save(manager, rank, 1)
        with pytest.raises(CheckpointError, match="belongs to attempt 2"):
            save(manager, rank, 2)

    job(body)


def test_a_missing_part_is_named(job: Job, tmp_path: Path, told: Told) -> None:
    def body(rank: int) -> None:
        given_up = threading.Event()

        def hang(call: str, name: str) -> None:
            if rank == 1 and call == "write" and "step-000000000002/data-" in name:
                assert given_up.wait(LIMIT_S)

        storage = told(DirectoryStorage(tmp_path / "c"), hang)
        manager = CheckpointManager(storage, commit_deadline_s=10 if rank == 1 else 1)
        save(manager, rank, 1)
        if rank == 0:
            with pytest.raises(CheckpointError, match=r"no part from rank\(s\) 1 within 1 s"):
                save(manager, rank, 2)
            dist.barrier()
        else:
            handle = manager.save(2, state_of(2), per_rank=[torch.ones(1)])
            dist.barrier()
            given_up.set()
            with pytest.raises(CheckpointError, match="no part from rank"):
                handle.wait()
        assert manager.load()["step"] == 1

    job(body)


def test_a_rank_that_does_not_come_to_save_fails_it_on_all(job: Job, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c", commit_deadline_s=1)
        save(manager, rank, 1)
        if rank == 0:
            with pytest.raises(CheckpointError, match="a rank has ended or does not take part"):
                manager.save(2, state_of(2))
        dist.barrier()
        with pytest.raises(CheckpointError, match="a rank has ended or does not take part"):
            manager.save(3, state_of(3))
        assert manager.latest() == 1

    job(body)


def test_a_rank_that_gave_up_waiting_leaves_what_rank_0_still_commits(
    job: Job, tmp_path: Path, told: Told
) -> None:
    gave_up, tell = os.pipe()

    def body(rank: int) -> None:
        def commit_late(call: str, name: str) -> None:
            if rank == 0 and call == "write" and "/manifest-" in name:
                assert os.read(gave_up, 1) == b"!"

        storage = told(DirectoryStorage(tmp_path / "c"), commit_late)
        manager = CheckpointManager(storage, commit_deadline_s=30 if rank == 0 else 0.2)
        if rank == 1:
            with pytest.raises(CheckpointError, match=r"rank 0 did not commit it within 0.2 s"):
                save(manager, rank, 1)
            os.write(tell, b"!")
        else:
            save(manager, rank, 1)
        dist.barrier()
        assert manager.load()["step"] == 1
        assert (manager.loaded_per_rank() or {})["rank"] == rank

    job(body)
    os.close(gave_up)
    os.close(tell)


def test_a_rank_without_space_fails_the_save_on_all(job: Job, tmp_path: Path, told: Told) -> None:
    def body(rank: int) -> None:
        full = False

        def refuse(call: str, name: str) -> None:
            if full and rank == 1 and call == "write" and "/data-" in name:
                raise NoSpace("no space left for rank 1")

        manager = CheckpointManager(told(DirectoryStorage(tmp_path / "c"), refuse))
        save(manager, rank, 1)
        full = True
        started = time.monotonic()
        with pytest.raises(
            NoSpace if rank == 1 else CheckpointError, match="no space left for rank 1"
        ):
            save(manager, rank, 2)
        assert time.monotonic() - started < 300, "nobody waits for the deadline of 600 s"
        full = False
        dist.barrier()
        assert manager.load()["step"] == 1
        save(manager, rank, 3)
        dist.barrier()
        assert manager.steps() == [1, 3]

    job(body)
    assert not (tmp_path / "c" / "step-000000000002").exists(), (
        "the failed save gave its space back"
    )


def test_rank_0_that_fails_tells_the_others(job: Job, tmp_path: Path, told: Told) -> None:
    def body(rank: int) -> None:
        def refuse(call: str, name: str) -> None:
            if rank == 0 and call == "write" and "/manifest-" in name:
                raise NoSpace("no space left for a manifest")

        manager = CheckpointManager(told(DirectoryStorage(tmp_path / "c"), refuse))
        with pytest.raises(
            NoSpace if rank == 0 else CheckpointError, match="no space left for a manifest"
        ):
            save(manager, rank, 1)
        assert manager.latest() is None

    job(body)
    assert not list((tmp_path / "c").rglob("data-*"))


def test_a_state_that_only_one_rank_cannot_save_fails_on_all(job: Job, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c")
        per_rank = {"bad": object() if rank == 1 else 1}
        with pytest.raises(CheckpointError, match="cannot save bad"):
            manager.save(1, state_of(1), per_rank=per_rank).wait()
        dist.barrier()
        save(manager, rank, 2)

    job(body)


def test_a_fenced_rank_0_stops_all_at_their_first_save(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIREFLYER_ATTEMPT", "2")
    CheckpointManager(tmp_path / "c").save(1, state_of(1)).wait()
    monkeypatch.setenv("FIREFLYER_ATTEMPT", "1")

    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c")
        with pytest.raises(
            CheckpointError, match="is older" if rank == 0 else "rank 0 could not .*is older"
        ):
            manager.save(2, state_of(2))

    job(body)


def test_a_save_does_not_touch_the_training_group(job: Job, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c")
        gradient = torch.ones(10)
        if rank == 0:
            work = dist.all_reduce(gradient, async_op=True)
        save(manager, rank, 1)
        assert manager.load()["step"] == 1
        if rank == 0:
            work.wait()
        else:
            dist.all_reduce(gradient)
        assert gradient.tolist() == [2.0] * 10

    job(body)


def test_ranks_agree_when_to_save_whatever_their_clocks_say(job: Job, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        clock = ManualClock(1000.0 * rank)
        manager = CheckpointManager(tmp_path / "c", every="10s", clock=clock)
        decided = []
        for step in range(200):
            clock.advance(0.5 + 3 * rank)
            if manager.should_save(step):
                decided.append(step)
        mine = torch.tensor(decided)
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(mine, theirs)
        assert len(decided) >= 8

    job(body)


@pytest.mark.parametrize("victim", range(WORLD))
def test_a_rank_killed_at_points_of_a_save(
    ram: Path, forked: Callable[..., list[int]], die_at: Callable[[int], None], victim: int
) -> None:
    """System calls on files; the other rank gives up or commits. No mixture, nothing lost."""
    acknowledged = ram / "acknowledged"

    def body(rank: int, place: Path, call: int) -> None:
        rendezvous = f"file://{place}.rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD)
        manager = CheckpointManager(place, commit_deadline_s=0.3)
        save(manager, rank, 1)
        dist.barrier()
        if rank == victim:
            die_at(call)
        manager.save(2, state_of(2), per_rank={"rng": torch.full((rank + 1,), 2), "rank": rank})
        with contextlib.suppress(CheckpointError):
            manager.wait()
            acknowledged.touch()

    alive, call, steps = True, 1, []
    while alive:
        acknowledged.unlink(missing_ok=True)
        place = ram / f"killed-{call}"
        ranks = [
            lambda rank=rank, place=place, call=call: body(rank, place, call)
            for rank in range(WORLD)
        ]
        codes = forked(*ranks)
        alive = codes[victim] == -signal.SIGKILL
        assert codes[1 - victim] == 0
        reader = CheckpointManager(place)
        state = reader.load()
        step = state["step"]
        assert step == 2 or not acknowledged.exists()
        assert state["w"].tolist() == [float(step)] * 100
        assert (reader.loaded_per_rank() or {})["rng"].tolist() == [step]
        steps.append(step)
        call += 3 if SOAK else 6
    assert len(steps) > (4 if SOAK else 2)
    assert 1 in steps
