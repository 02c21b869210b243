"""Ranks are killed and come, and training is that of one process with the same global batches."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.haiscale.elastic.elastic_job import (
    POINTS,
    STEPS,
    Job,
    build,
    check,
    deaths,
    die,
    die_at,
    following,
    init,
    join,
)
from tests.waiting import until

from fireflyer.errors import (
    CollectiveError,
    ConfigError,
    DeadlineExceeded,
    RankFailed,
    Stale,
)
from fireflyer.haiscale.ddp import DistributedDataParallel

Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_SECRET", "of this job")


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("point", POINTS)
def test_four_ranks_become_two(start_gang: Start, store_path: str, point: str, seed: int) -> None:
    plan = deaths(seed, point)

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        job = Job(rank, rank, world)
        job.wrap(static_graph=bool(seed))
        if rank in plan:
            die_at(job, *plan[rank])
        job.train()
        return job.result()

    results = start_gang(body, 4, nodes=1 + seed).results()
    assert [rank for rank, result in enumerate(results) if result is None] == sorted(plan)
    check([result for result in results if result is not None], 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("late", [(0,), (1, 2), (0, 2)])
def test_who_is_behind_takes_the_states_of_who_is_ahead(
    start_gang: Start, store_path: str, late: tuple[int, ...]
) -> None:
    """Rank 3 dies behind its step; some of the others had theirs, some hear of the death before its end."""

    def body(rank: int, world: int) -> Any:
        group = init(store_path, rank, world)
        job = Job(rank, rank, world)
        elastic = job.wrap()
        if rank == 3:
            die_at(job, 4, "between steps")
        reducer = job.model.reducer
        arrive = reducer.arrive

        def arrive_late(bucket: Any) -> None:
            if elastic.steps == 4 and bucket.works:
                until(lambda: group.errored() is not None)
                raise group.errored()
            arrive(bucket)

        if rank in late:
            reducer.arrive = arrive_late
        with following() as seen:
            job.train()
        return job.result(), seen

    results = start_gang(body, 4).results()[:3]
    check([result for result, _ in results], 3)
    ahead = min({0, 1, 2} - set(late))
    expected = [8 if rank in late else 10 for rank in range(3)]
    assert [seen for _, seen in results] == [[(expected, ahead)]] * 3


def test_a_newcomer_gets_everything_and_shares_the_work(
    start_gang: Start, store_path: str, tmp_path: Path
) -> None:
    """The work of a rank that has died is taken over by one that comes later."""
    members = tmp_path / "members"

    def body(rank: int, world: int) -> Any:
        if rank == 3:
            until(lambda: members.exists() and len(members.read_text().split()) == 2)
            group = join(members)
            assert (group.joined, group.size()) == (True, 3)
        else:
            group = init(store_path, rank, 3)
        job = Job(rank, dist.get_rank(), dist.get_world_size())
        elastic = job.wrap(members_file=members)
        fenced: list[int] = []
        elastic.fenced.append(fenced.append)

        def act(point: str) -> None:
            if point == "between steps" and (rank, elastic.steps) == (1, 2):
                die()
            if point == "between steps" and (rank, elastic.steps) == (0, 5):
                until(lambda: group.newcomers_wait or group.size() == 3)

        job.act = act
        job.train()
        assert elastic.generation == fenced[-1] == max(fenced)
        return job.result()

    results = start_gang(body, 4).results()
    assert results[1] is None
    check([results[0], results[2], results[3]], 3)


def test_a_newcomer_with_another_model_is_refused_and_the_job_goes_on(
    start_gang: Start, store_path: str, tmp_path: Path
) -> None:
    members = tmp_path / "members"

    def body(rank: int, world: int) -> Any:
        group = join(members) if rank == 2 else init(store_path, rank, 2)
        job = Job(rank, dist.get_rank(), dist.get_world_size(), width=8 + rank // 2)
        elastic = job.wrap(members_file=members)
        if rank == 2:
            with pytest.raises(ConfigError, match=r"parameter 0.weight \(8, 6\).*rank 2 has.*9, 6"):
                job.train()
            return job.model.elastic.steps

        def act(point: str) -> None:
            if point == "between steps" and elastic.steps == 2 and rank == 0:
                until(lambda: group.newcomers_wait or elastic.generation > 0)

        job.act = act
        job.train()
        assert elastic.generation == 2, "one with it, and one without"
        return job.result()

    results = start_gang(body, 3).results()
    assert results[2] == 0
    check(results[:2], 2)


@pytest.mark.parametrize("lost", [(0, 1), (2, 3)])
def test_of_two_halves_the_one_with_the_lowest_rank_goes_on(
    start_gang: Start, store_path: str, tmp_path: Path, lost: tuple[int, int]
) -> None:
    both = tmp_path / "both are in the forward"

    def body(rank: int, world: int) -> Any:
        group = init(store_path, rank, world)
        job = Job(rank, rank, world)
        elastic = job.wrap()
        if 0 in lost:
            elastic.forming_s = 1.0

        def act(point: str) -> None:
            if point == "forward" and elastic.steps == 3:
                if rank == lost[0]:
                    until(both.exists)
                if rank == lost[1]:
                    both.touch()
                    until(lambda: group.errored() is not None)
                if rank in lost:
                    die()

        job.act = act
        if 0 in lost and rank not in lost:
            with pytest.raises(DeadlineExceeded, match="of 4 ranks voted, more than half"):
                job.train()
            return elastic.steps
        job.train()
        return job.result()

    results = [result for result in start_gang(body, 4).results() if result is not None]
    if 0 in lost:
        assert results == [3, 3]
    else:
        check(results, 2)


@pytest.mark.parametrize("granted", [True, False])
def test_with_a_permit_any_number_may_go_on_and_without_it_nobody(
    start_gang: Start, store_path: str, granted: bool
) -> None:
    """Ranks 1 and 2 of four are left, which would be too few."""

    def body(rank: int, world: int) -> Any:
        group = init(store_path, rank, world)
        before = [address.partition("/")[0] for address in group.join_addresses]
        job = Job(rank, rank, world)
        elastic = job.wrap()
        asked: list[Any] = []

        def permit(generation: int, members: tuple[str, ...], minority: bool) -> bool:
            asked.append((generation, [before.index(member) for member in members], minority))
            return granted

        elastic.permit = permit

        def act(point: str) -> None:
            if point == "forward" and elastic.steps == 3:
                if rank == 3:
                    until(lambda: group.errored() is not None)
                if rank in (0, 3):
                    die()

        job.act = act
        if not granted:
            with pytest.raises(Stale, match="got no permit"):
                job.train()
            return asked, None
        job.train()
        return asked, job.result()

    _, first, second, _ = start_gang(body, 4).results()
    views = [[(1, [1, 2], True)], [(1, [1, 2, 3], False), (2, [1, 2], False)]]
    if granted:
        check([first[1], second[1]], 2)
    assert first[0] in (views if granted else [views[0], views[1][:1]])
    assert second[0] == []


def test_what_comes_behind_the_update_may_fail_and_the_step_counts(
    start_gang: Start, store_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        job = Job(rank, rank, world)
        elastic = job.wrap()
        logging.getLogger("fireflyer").propagate = True
        batches = job.batches()
        bodies = 0
        while elastic.steps < STEPS:
            with elastic.step() as step:
                bodies += 1
                mine = next(batches)
                step.weight = len(mine)
                job.update(mine)
                if rank == 2 and elastic.steps == 4:
                    die()
                dist.all_reduce(torch.ones(3))
        return bodies, "did not complete" in caplog.text, job.result()

    results = start_gang(body, 3).results()[:2]
    assert [result[:2] for result in results] == [(STEPS, True)] * 2
    check([result[2] for result in results], 2)


def test_errors_that_no_membership_mends_end_the_step(start_gang: Start, store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        job = Job(rank, rank, world)
        job.wrap()
        job.act = lambda point: (
            dist.all_reduce(torch.ones(1 + rank)) if point == "before the update" else None
        )
        with pytest.raises(CollectiveError) as caught:
            job.train()
        assert not isinstance(caught.value, RankFailed)
        return job.model.elastic.generation

    assert start_gang(body, 2).results() == [0, 0]


def test_an_error_of_one_rank_is_its_own_and_the_others_go_on(
    start_gang: Start, store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        job = Job(rank, rank, world)
        elastic = job.wrap()
        if rank == 1:

            def act(point: str) -> None:
                if (point, elastic.steps) == ("backward", 2):
                    raise ValueError("out of order")

            job.act = act
            with pytest.raises(ValueError, match="out of order"):
                job.train()
            return None  # and leaves
        job.train()
        return job.result()

    results = start_gang(body, 3).results()
    check([results[0], results[2]], 2)


def test_wrong_uses_are_named(start_gang: Start, store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        job = Job(rank, rank, world)
        with pytest.raises(ConfigError, match="optimizer="):
            DistributedDataParallel(job.core, elastic=True)
        with pytest.raises(ConfigError, match="elastic=True"):
            DistributedDataParallel(build(0), redivide=job.loader.redivide)
        with pytest.raises(ConfigError, match="without elastic=True"):
            _ = DistributedDataParallel(build(0)).elastic
        elastic = job.wrap()
        with pytest.raises(ConfigError, match="once within each"):
            job.optimizer.step()
        with pytest.raises(ConfigError, match=r"state\['odd'\] is a .*Unsendable"):
            elastic.carry(Unsendable())
        with elastic.step(), pytest.raises(ConfigError, match="cannot be nested"):
            elastic.step().__enter__()
        with pytest.raises(ConfigError, match="invalid weight -1"), elastic.step(-1):
            job.update([0])
        job.train(1)
        with pytest.raises(ConfigError, match="before the first step"):
            elastic.carry(job.scheduler)
        with elastic.step():
            job.update([0])
            with pytest.raises(ConfigError, match="once within each"):
                job.update([0])

    start_gang(body, 1).results()


class Unsendable:
    def state_dict(self) -> Any:
        return {"odd": self}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError
