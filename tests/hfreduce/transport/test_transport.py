"""The choice of what carries bytes between hosts, and the whole stack over UCX, by its TCP and with
CMA beside it (by which a receiver on the same machine fetches as it does over RDMA)."""

import ctypes.util
import datetime
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.collectives.cases import Case, check_cases, collectives
from tests.hfreduce.collectives.test_collectives import generated
from tests.hfreduce.conftest import MEMORY, Play

from fireflyer.errors import CollectiveError, ConfigError, RankFailed
from fireflyer.hfreduce import ProcessGroupHFReduce
from fireflyer.hfreduce.transport import VARIABLE

MINUTE = datetime.timedelta(seconds=60)
with_ucx = pytest.mark.skipif(
    ctypes.util.find_library("ucp") is None, reason="no UCX here: apt-get install libucx0"
)
TRANSPORTS = ("tcp", "tcp,cma")


@pytest.fixture(params=TRANSPORTS)
def over_ucx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ucx")
    monkeypatch.setenv("UCX_TLS", request.param)


def init(path: str, rank: int, world: int) -> Any:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world, timeout=MINUTE)
    return dist.group.WORLD


def init_and_reduce(path: str, rank: int, world: int) -> None:
    init(path, rank, world)
    dist.all_reduce(torch.ones(10))


def reduce_for_ever(tensor: torch.Tensor) -> None:
    while True:
        dist.all_reduce(tensor)


# -- the stack over UCX ----------------------------------------------------------------------------


@pytest.mark.sample(1, 1)
@with_ucx
@pytest.mark.usefixtures("over_ucx")
@pytest.mark.parametrize("shape", ["AABB", "ABC"])
def test_every_collective_over_ucx(play: Play, shape: str) -> None:
    world = len(shape)
    chosen = [
        Case(c, torch.float32, "SUM", count, MEMORY[(i + j) % len(MEMORY)], j % 2 == 1, i % world)
        for i, c in enumerate(collectives(world))
        for j, count in enumerate((1, 8193, 300_001))
    ]
    check_cases(play, shape, chosen + generated(shape, 40))


@with_ucx
@pytest.mark.usefixtures("over_ucx")
def test_who_leaves_after_the_last_call_leaves_nobody_without_its_bytes(play: Play) -> None:
    def body(rank: int, world: int) -> bool:
        tensors = [torch.full((count,), float(rank)) for count in (7, 700_000, 3)]
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        dist.destroy_process_group()
        return all(bool((tensor == 0).all()) for tensor in tensors)

    for _ in range(3):
        assert all(play(body, "ABC", leave=False))


@with_ucx
def test_both_transports_send_the_same_bytes(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The payload alone is counted, whatever UCX adds."""

    def body(rank: int, world: int) -> int:
        tensor = torch.ones(1_000_000)
        dist.all_reduce(tensor)
        assert tensor[0] == world
        group: Any = dist.group.WORLD
        sent: int = group.network_bytes_sent
        return sent

    monkeypatch.setenv(VARIABLE, "tcp")
    over_tcp = play(body, "AAB")
    monkeypatch.setenv(VARIABLE, "ucx")
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert play(body, "AAB") == over_tcp
    assert max(over_tcp) > 1_000_000


@with_ucx
@pytest.mark.usefixtures("over_ucx")
@pytest.mark.parametrize("shape", ["ABC", "AABB"])
def test_a_killed_rank_is_named_and_the_others_go_on(
    start_gang: Callable[..., Any], store_path: str, shape: str
) -> None:
    def body(rank: int, world: int) -> Any:
        os.environ["FIREFLYER_NODE"] = shape[rank]
        group = init(store_path, rank, world)
        tensor = torch.ones(2_000_000)
        dist.all_reduce(tensor)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RankFailed) as caught:
            reduce_for_ever(tensor)
        group.reform(MINUTE)
        tensor = torch.ones(2_000_000)
        dist.all_reduce(tensor)
        return caught.value.rank, float(tensor[-1])

    gang = start_gang(body, len(shape))
    others = [rank for rank in range(len(shape)) if rank != 1]
    assert [gang.result(rank) for rank in others] == [(1, len(others))] * len(others)
    assert gang.result(1) is None


# -- the choice ------------------------------------------------------------------------------------


def refused(start_gang: Callable[..., Any], path: str, choices: list[str | None]) -> list[str]:
    """What the ranks of hosts of their own hear when they choose so."""

    def body(rank: int, world: int) -> str:
        if (choice := choices[rank]) is not None:
            os.environ[VARIABLE] = choice
        with pytest.raises(ConfigError) as caught:
            init(path, rank, world)
        return str(caught.value)

    texts: list[str] = start_gang(body, len(choices), len(choices)).results()
    return texts


def test_ranks_that_choose_differently_all_hear_of_both(
    start_gang: Callable[..., Any], store_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    texts = refused(start_gang, store_path, [None, "tcp", "ucx"])
    assert set(texts) == {f"{VARIABLE} must be equal on all ranks: tcp on rank 0, ucx on rank 2"}


def test_a_transport_that_does_not_exist_is_refused_on_all_ranks(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    texts = refused(start_gang, store_path, ["tcp", "rdma"])
    assert set(texts) == {f"invalid {VARIABLE} 'rdma' on rank 1: expected tcp or ucx"}


def test_without_the_library_all_ranks_hear_which_package_is_missing_where(
    start_gang: Callable[..., Any], store_path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There it is a file that is no library, found before the real one."""
    (tmp_path / "libucp.so.0").touch()
    code = """if True:
        from fireflyer._native import hfreduce as native
        from fireflyer.errors import CollectiveError
        try:
            native.load_ucx()
        except CollectiveError as error:
            print(error, end="")"""
    lack = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "the UCX transport needs libucp.so.0" in lack
    assert "install the package libucx0" in lack

    def load() -> None:
        if os.environ["RANK"] == "1":
            raise CollectiveError(lack)

    monkeypatch.setattr("fireflyer._native.hfreduce.load_ucx", load)
    texts = refused(start_gang, store_path, ["ucx", "ucx", "ucx"])
    assert set(texts) == {f"{VARIABLE}=ucx on rank 1: {lack}"}


def test_one_host_needs_no_library(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise CollectiveError("no UCX")

    def body(rank: int, world: int) -> float:
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        return float(tensor[0])

    monkeypatch.setattr("fireflyer._native.hfreduce.load_ucx", load)
    monkeypatch.setenv(VARIABLE, "ucx")
    assert play(body, "AA") == [2.0, 2.0]


@with_ucx
def test_a_rank_whose_ucx_does_not_start_fails_the_group(
    start_gang: Callable[..., Any], store_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "ucx")

    def body(rank: int, world: int) -> str:
        os.environ["UCX_TLS"] = "no_such" if rank == 1 else "tcp"
        with pytest.raises(CollectiveError) as caught:
            init_and_reduce(store_path, rank, world)
        return str(caught.value)

    texts = start_gang(body, 3, 3).results()
    assert "UCX: ucp_init" in texts[1]
    # Who meets a rank that has already given up because of rank 1 names that one.
    assert any("rank 1" in text for text in texts[::2]), texts
    assert re.search("rank [12]", texts[0]), texts
    assert re.search("rank [01]", texts[2]), texts


@with_ucx
def test_a_newcomer_takes_the_groups_transport(
    start_gang: Callable[..., Any],
    store_path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who insists on another hears so and is left out; the others go on."""
    monkeypatch.setenv("FIREFLYER_SECRET", "of this job")
    monkeypatch.setenv("UCX_TLS", "tcp")
    members = f"{store_path}-members"

    def body(rank: int, world: int) -> Any:
        store = dist.FileStore(members, 4)
        if rank == 2:
            store.get("turned away")
            address = store.get("address").decode()
            return float(reduced(ProcessGroupHFReduce.join([address], MINUTE)))
        if rank == 3:
            os.environ[VARIABLE] = "tcp"
            address = store.get("address").decode()
            with pytest.raises(ConfigError) as caught:
                ProcessGroupHFReduce.join([address], MINUTE)
            store.set("turned away", "yes")
            return str(caught.value)
        os.environ[VARIABLE] = "ucx"
        os.environ["WORLD_SIZE"] = "2"
        group = init(store_path, rank, 2)
        if rank == 0:
            store.set("address", group.join_address)
        while group.size() != 3:  # the newcomer has not come yet, or was turned away
            group.reform(MINUTE)
        return float(reduced(group))

    def reduced(group: Any) -> torch.Tensor:
        tensor = torch.ones(1_000_000)
        group.allreduce([tensor]).wait()
        return tensor[-1]

    texts = start_gang(body, 4, 4).results()
    assert texts[:3] == [3.0, 3.0, 3.0]
    assert texts[3] == (
        f"{VARIABLE} is 'tcp', but the group to join uses 'ucx': unset it or set ucx"
    )
