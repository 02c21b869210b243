"""Of a network that is cut in two, at most one part trains on."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.haiscale.elastic.elastic_job import Job, check, init

from fireflyer.errors import DeadlineExceeded, LabError, RankFailed
from fireflyer.lab.hosts import Lab


@pytest.fixture
def lab() -> Iterator[Lab]:
    try:
        with Lab(hosts=4) as lab:
            yield lab
    except LabError as error:
        pytest.skip(f"needs network namespaces: {error}")


@pytest.mark.netns
@pytest.mark.parametrize("lost", [(2, 3), (0, 1)])
def test_the_half_with_the_lowest_rank_goes_on(
    start_gang: Callable[..., Any], store_path: str, lab: Lab, lost: tuple[int, int]
) -> None:
    """Two of four hosts lose their cables; the other two still reach each other."""
    here, cut = os.pipe(), os.pipe()

    def body(rank: int, world: int) -> Any:
        host = lab.hosts[rank]
        host.enter()
        os.environ["FIREFLYER_IFNAME"] = host.interface
        os.environ["FIREFLYER_NODE"] = ""  # the namespace alone tells the hosts apart
        init(store_path, rank, world, timeout_s=2.0)
        job = Job(rank, rank, world)
        elastic = job.wrap()
        elastic.patience_s, elastic.forming_s = 1.0, 4.0

        def act(point: str) -> None:
            if (point, elastic.steps, elastic.generation) == ("between steps", 3, 0):
                os.write(here[1], b"x")
                os.read(cut[0], 1)

        job.act = act
        if rank in lost or 0 in lost:
            with pytest.raises((DeadlineExceeded, RankFailed)):
                job.train()
            return elastic.steps
        job.train()
        return job.result()

    gang = start_gang(body, 4)
    for _ in range(4):
        assert os.read(here[0], 1) == b"x"
    for rank in lost:
        lab.cut(rank)
    os.write(cut[1], b"xxxx")
    results = gang.results()
    for descriptor in (*here, *cut):
        os.close(descriptor)
    if 0 in lost:
        assert results == [3] * 4
    else:
        assert results[2:] == [3, 3]
        check(results[:2], 2)
