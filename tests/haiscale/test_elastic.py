"""Ranks are killed and come, and training is that of one process with the same global batches."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.haiscale.elastic_job import (
    POINTS,
    Job,
    check,
    deaths,
    die_at,
    init,
)

Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_SECRET", "of this job")


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
