"""Cores: what a rank may use, whether waiters spin, where the engine's threads run."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init

from fireflyer.errors import ConfigError
from fireflyer.hfreduce import cores


@dataclass(frozen=True)
class Rank:
    cpus: tuple[int, ...]
    quota: float = 0.0
    spin: bool | None = None


@pytest.mark.parametrize(
    ("ranks", "spins"),
    [
        ([Rank((0, 1)), Rank((0, 1))], True),
        ([Rank((0, 1))] * 3, False),
        ([Rank((0,)), Rank((1,)), Rank((2,))], True),  # pinned to a core each
        ([Rank((0,)), Rank((0,))], False),
        ([Rank((0, 1, 2, 3), quota=1.5)] * 2, False),
        ([Rank((0, 1, 2, 3), quota=2.0)] * 2, True),
        ([Rank((0,), spin=True)] * 2, True),
        ([Rank((0, 1), spin=False), Rank((0, 1), spin=True)], False),  # the first decides for all
    ],
)
def test_waiters_spin_where_every_rank_has_a_core(ranks: list[Rank], spins: bool) -> None:
    assert cores.may_spin(ranks) is spins


def test_the_least_quota_of_all_levels_counts(tmp_path: Path) -> None:
    group = tmp_path / "pods" / "pod1"
    group.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("0::/pods/pod1\n")
    assert cores.quota(tmp_path, membership) == 0.0
    (group / "cpu.max").write_text("max 100000\n")
    assert cores.quota(tmp_path, membership) == 0.0
    (tmp_path / "pods" / "cpu.max").write_text("250000 100000\n")
    assert cores.quota(tmp_path, membership) == 2.5
    (group / "cpu.max").write_text("50000 100000\n")
    assert cores.quota(tmp_path, membership) == 0.5
    assert cores.quota(tmp_path, tmp_path / "missing") == 0.0


@pytest.mark.parametrize("text", ["x", "1-", "0,,1", "-1", "3-1-2", "4000"])
def test_a_bad_list_of_cores_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_HFREDUCE_CPUS", text)
    with pytest.raises(ConfigError, match="FIREFLYER_HFREDUCE_CPUS"):
        cores.chosen()


def test_a_bad_wish_to_spin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_HFREDUCE_SPIN", "yes")
    with pytest.raises(ConfigError, match="expected 0 or 1"):
        cores.spin_wanted()


def test_ranks_with_other_cores_agree_how_to_wait(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    """Small calls take another path where ranks outnumber cores: all must see the same."""

    def body(rank: int, world: int) -> float:
        if rank == 0:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        init(store_path, rank, world)
        tensor = torch.ones(16)
        dist.all_reduce(tensor)
        return float(tensor[0])

    assert start_gang(body, 2).results() == [2.0, 2.0]


@pytest.mark.parametrize("spin", ["0", "1"])
def test_threads_of_the_engine_stay_on_the_chosen_cores(
    start_gang: Callable[..., Any], store_path: str, spin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = max(os.sched_getaffinity(0))
    monkeypatch.setenv("FIREFLYER_HFREDUCE_CPUS", str(core))
    monkeypatch.setenv("FIREFLYER_HFREDUCE_SPIN", spin)

    def threads() -> dict[int, set[int]]:
        return {int(tid): os.sched_getaffinity(int(tid)) for tid in os.listdir("/proc/self/task")}

    def body(rank: int, world: int) -> tuple[int, set[int]]:
        everywhere = os.sched_getaffinity(0)
        init(store_path, rank, world)
        work: Any = dist.all_reduce(torch.ones(10), async_op=True)
        work.wait()
        pinned = [cpus for cpus in threads().values() if cpus == {core}]
        assert os.sched_getaffinity(0) == everywhere, "the caller's own thread is left alone"
        return len(pinned), everywhere

    for pinned, everywhere in start_gang(body, 2).results():
        assert len(everywhere) == 1 or pinned == 2, "the engine's thread and the watch's"
