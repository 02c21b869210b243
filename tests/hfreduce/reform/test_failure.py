"""What a rank that dies, freezes, lies or is a stranger does to the others."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import comes_true, die, init, meet, open_files

from fireflyer._native import hfreduce as native
from fireflyer.errors import (
    CollectiveError,
    ConfigError,
    DeadlineExceeded,
    NoSpace,
    ProtocolMismatch,
    RankFailed,
)
from fireflyer.hfreduce.rendezvous import establish


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_killed_rank_is_named_on_every_other_rank(
    start_gang: Callable[..., Any], store_path: str, nodes: int
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        tensor = torch.ones(500_000)
        dist.all_reduce(tensor)
        meet(store_path, rank, world)
        if rank == 1:
            die()
        with pytest.raises(RankFailed) as caught:
            dist.all_reduce(tensor)
        with pytest.raises(CollectiveError):  # the group stays broken
            dist.all_reduce(tensor)
        return caught.value.rank

    gang = start_gang(body, 3, nodes)
    named = [gang.result(0), gang.result(2)]
    if nodes == 1:
        assert named == [1, 1]
    else:
        assert 1 in named, "in a ring, a neighbour of the dead rank names it"
    assert gang.result(1) is None


def test_a_killed_rank_is_seen_although_its_child_holds_its_sockets(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    alive, hold = os.pipe()

    def body(rank: int, world: int) -> Any:
        os.close(hold)
        init(store_path, rank, world)
        tensor = torch.ones(500_000)
        dist.all_reduce(tensor)
        meet(store_path, rank, world)
        if rank == 1:
            if os.fork() == 0:
                os.read(alive, 1)  # until the test is over
                os._exit(0)
            die()
        with pytest.raises(RankFailed) as caught:
            dist.all_reduce(tensor)
        return caught.value.rank

    try:
        assert start_gang(body, 2).result(0) == 1
    finally:
        os.close(hold)
        os.close(alive)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_forked_child_lets_go_of_its_parents_group(
    start_gang: Callable[..., Any], store_path: str, nodes: int
) -> None:
    """While calls of the parent are under way: the child has none of the threads that could end them."""

    def body(rank: int, world: int) -> float:
        init(store_path, rank, world)
        tensor = torch.ones(100_000)
        if rank == 0:
            work: Any = dist.all_reduce(tensor, async_op=True)
            future = work.get_future()
            child = os.fork()
            if child == 0:
                dist.destroy_process_group()
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            meet(store_path, rank, world)
            return float(future.wait()[0][0])
        meet(store_path, rank, world)
        dist.all_reduce(tensor)
        return float(tensor[0])

    assert start_gang(body, 2, nodes).results() == [2.0, 2.0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_frozen_rank_ends_the_operation_at_its_timeout(
    start_gang: Callable[..., Any], store_path: str, nodes: int
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world, timeout_s=2.0)
        tensor = torch.ones(500_000)
        dist.all_reduce(tensor)
        meet(store_path, rank, world)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(RankFailed) as caught:
            dist.all_reduce(tensor)
        return caught.value.rank

    assert start_gang(body, 2, nodes).result(0) == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_call_different_things_are_told_both_calls(
    start_gang: Callable[..., Any], store_path: str, nodes: int
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        with pytest.raises(CollectiveError) as caught:
            dist.all_reduce(torch.ones(100_000 + rank))
        return str(caught.value)

    messages = start_gang(body, 2, nodes).results()
    assert any("100000" in m and "100001" in m for m in messages)


@pytest.mark.parametrize("nodes", [1, 2])
def test_abort_ends_a_waiting_operation(
    start_gang: Callable[..., Any], store_path: str, nodes: int
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        group: Any = dist.group.WORLD
        signal_store = dist.FileStore(store_path + "-signals", world)
        if rank == 0:
            work: Any = dist.all_reduce(torch.ones(100_000), async_op=True)
            group.abort()
            with pytest.raises(CollectiveError):
                work.wait()
            with pytest.raises(RuntimeError, match="CollectiveError"):  # C++ keeps no Python type
                work.get_future().wait()
            signal_store.set("aborted", "1")
        else:
            signal_store.get("aborted")
            with pytest.raises(CollectiveError):
                dist.all_reduce(torch.ones(100_000))
        return True

    assert start_gang(body, 2, nodes).results() == [True, True]


def test_a_stranger_cannot_join_the_ring(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        os.environ["FIREFLYER_SECRET"] = "right" if rank == 0 else "wrong"
        with pytest.raises((ProtocolMismatch, OSError)) as caught:
            init(store_path, rank, world, timeout_s=5.0)
        return type(caught.value) is ProtocolMismatch

    assert any(start_gang(body, 2, nodes=2).results())


def test_connections_that_say_nothing_do_not_block_the_ring(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        original = establish._infos

        def with_noise(*arguments: Any) -> list[establish.RankInfo]:
            infos = original(*arguments)
            for info in infos:
                with socket.create_connection((info.address, info.port)) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
            return infos

        setattr(establish, "_infos", with_noise)  # noqa: B010  # mypy knows its type
        init(store_path, rank, world)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        return float(tensor[0])

    assert start_gang(body, 2, nodes=2).results() == [2.0, 2.0]


def test_refused_memory_is_a_typed_error(start_gang: Callable[..., Any]) -> None:
    def body(rank: int, world: int) -> bool:
        import fireflyer.hfreduce as hfreduce

        with pytest.raises(NoSpace):
            hfreduce.empty(1 << 50, dtype=torch.float32)
        return True

    assert start_gang(body, 1).results() == [True]


def test_a_group_leaves_no_descriptor_and_no_process(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        dist.destroy_process_group()
        before = open_files()
        for i in range(5):
            init(f"{store_path}-{i}", rank, world)
            work = dist.all_reduce(torch.ones(50_000), async_op=True)
            assert work is not None
            work.get_future().wait()
            del work
            dist.destroy_process_group()
        return comes_true(lambda: open_files() <= before)

    assert start_gang(body, 2, nodes=2).results() == [True, True]


def test_import_registers_the_backend_and_starts_nothing() -> None:
    assert hasattr(dist.Backend, "HFREDUCE")
    assert native.arena_reserved_bytes() == 0


def test_a_rank_that_never_comes_is_named_when_the_timeout_has_passed(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> str:
        if rank == 1:
            return "stays away"
        with pytest.raises(DeadlineExceeded) as caught:
            init(store_path, rank, world, timeout_s=1.5)
        return str(caught.value)

    text = "rank 1 did not arrive within 1.5 s"
    assert start_gang(body, 3).results() == [text, "stays away", text]


def test_a_rank_that_dies_before_all_have_come_is_noticed(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> int:
        if rank == 2:
            return -1  # never comes
        if rank == 1:
            threading.Timer(0.5, die).start()
        with pytest.raises(RankFailed) as caught:
            init(store_path, rank, world)
        return caught.value.rank

    assert start_gang(body, 3).results() == [1, None, -1]


@pytest.mark.parametrize("missing_on", [0, 1])
def test_a_secret_that_one_rank_lacks_is_said_on_all(
    start_gang: Callable[..., Any], store_path: str, missing_on: int
) -> None:
    def body(rank: int, world: int) -> str:
        os.environ.pop("FIREFLYER_SECRET", None)
        if rank != missing_on:
            os.environ["FIREFLYER_SECRET"] = "of this job"
        with pytest.raises((ConfigError, ProtocolMismatch, CollectiveError)) as caught:
            init(store_path, rank, world, timeout_s=20.0)
        return str(caught.value)

    ends = start_gang(body, 2, nodes=2).results()
    if missing_on == 1:
        reason = "rank 0 has FIREFLYER_SECRET, this rank does not: set it on all ranks"
        assert ends == [f"rank 1 cannot take part: {reason}", reason]


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [10, 3_000_000])
@pytest.mark.parametrize(("world", "nodes"), [(3, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("frozen", [False, True])
def test_who_is_late_is_named_by_those_too_who_wait_for_others(
    start_gang: Callable[..., Any],
    store_path: str,
    world: int,
    nodes: int,
    count: int,
    frozen: bool,
) -> None:
    culprit = world - 1

    def body(rank: int, world: int) -> int:
        init(store_path, rank, world, timeout_s=1.5)
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        meet(store_path, rank, world)
        if rank == culprit:
            if frozen:
                os.kill(os.getpid(), signal.SIGSTOP)
            return -1
        with pytest.raises(RankFailed) as caught:
            dist.all_reduce(tensor)
        return caught.value.rank

    gang = start_gang(body, world, nodes)
    assert [gang.result(rank) for rank in range(culprit)] == [culprit] * culprit
