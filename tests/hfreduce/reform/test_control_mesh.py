"""The news of deaths, farewells and errors reach every rank, over real processes and virtual nodes."""

import atexit
import gc
import itertools
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from tests.hfreduce.conftest import connect, die, meet
from tests.waiting import LIMIT_S

from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError, DeadlineExceeded, RankFailed
from fireflyer.hfreduce.rendezvous import establish
from fireflyer.hfreduce.rendezvous.establish import Connection
from fireflyer.hfreduce.rendezvous.handshake import Purpose
from fireflyer.hfreduce.rendezvous.peer_exchange import PeerExchange
from fireflyer.hfreduce.topology import RankInfo, Topology


def failure(connection: Connection) -> BaseException | None:
    try:
        connection.watch.rethrow()
    except CollectiveError as error:
        return error
    return None


def topology(*sizes: int) -> Topology:
    infos = [
        RankInfo("m", f"h{host}", "", "", 0) for host, size in enumerate(sizes) for _ in range(size)
    ]
    return Topology.of(infos)


def reached(links: set[tuple[int, int]], ranks: set[int]) -> set[int]:
    """Who hears what the lowest of `ranks` says, through living ranks alone."""
    heard, grew = {min(ranks)}, True
    while grew:
        new = {b for a, b in links if a in heard} | {a for a, b in links if b in heard}
        grew = not (new & ranks) <= heard
        heard |= new & ranks
    return heard


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 2), (1, 1, 1), (4, 1, 3), (8,) * 9, (1,) * 64])
def test_the_control_graph_is_connected_and_sparse(sizes: tuple[int, ...]) -> None:
    shape = topology(*sizes)
    links = shape.control_links()
    ranks = set(range(sum(sizes)))
    assert reached(links, ranks) == ranks
    assert all(a < b for a, b in links)
    across = {(a, b) for a, b in links if shape.place(a)[0] != shape.place(b)[0]}
    per_rank = 2 * max(len(sizes) - 1, 1).bit_length() * max(sizes) / min(sizes)
    for rank in ranks:
        assert sum(rank in link for link in across) <= per_rank


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1,) * 8, (3, 1, 2, 2)])
def test_two_deaths_do_not_cut_the_control_graph(sizes: tuple[int, ...]) -> None:
    links = topology(*sizes).control_links()
    ranks = set(range(sum(sizes)))
    for dead in itertools.combinations(ranks, 2):
        alive = ranks - set(dead)
        assert reached(links, alive) == alive, dead


@pytest.mark.parametrize("nodes", [1, 3, 6])
def test_everybody_hears_of_a_death_although_nobody_calls_anything(
    start_gang: Callable[..., Any], store_path: str, nodes: int
) -> None:
    def body(rank: int, world: int) -> Any:
        connection = connect(store_path, rank, world)
        meet(store_path, rank, world)
        if rank == 4:
            die()
        assert connection.watch.wait(LIMIT_S)
        error = failure(connection)
        assert isinstance(error, RankFailed)
        return error.rank, connection.watch.failed_ranks()

    gang = start_gang(body, 6, nodes)
    for rank in (0, 1, 2, 3, 5):
        named, failed = gang.result(rank)
        assert named == 4
        assert 4 in failed


def test_a_child_of_a_dead_rank_does_not_hide_its_death(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    alive, hold = os.pipe()

    def body(rank: int, world: int) -> Any:
        os.close(hold)
        connection = connect(store_path, rank, world)
        meet(store_path, rank, world)
        if rank == 1:
            if os.fork() == 0:  # as a worker of a data loader
                connection.close()
                os.read(alive, 1)  # until the test is over
                os._exit(0)
            die()
        assert connection.watch.wait(LIMIT_S)
        return type(failure(connection)), connection.watch.failed_ranks() >= {1}

    try:
        gang = start_gang(body, 3, 3)  # one rank a node: only its sockets tell
        assert [gang.result(rank) for rank in (0, 2)] == [(RankFailed, True)] * 2
    finally:
        os.close(hold)
        os.close(alive)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_child_may_end_a_copy_of_the_group_without_harm(
    start_gang: Callable[..., Any], store_path: str, nodes: int
) -> None:
    """While an operation runs in the parent, in its engine's thread."""

    def body(rank: int, world: int) -> Any:
        connection = connect(store_path, rank, world)
        data = np.ones(100_000, np.float32)
        call: Any = {"kind": native.Kind.ALLREDUCE, "count": 100_000, "dtype": native.DType.FLOAT32}
        if nodes > 1:
            connection.links.ensure(connection.group.peers(**call), Purpose.DATA)
        buffers = [(data.ctypes.data, data.nbytes)]
        call |= {"inputs": buffers, "outputs": buffers}
        if rank == 0:
            running = connection.group.submit(**call)
            child = os.fork()
            if child == 0:
                with pytest.raises(CollectiveError, match="forked child"):
                    connection.group.submit(**call)
                connection.group.abort()
                connection.watch.announce("from a child")
                connection.close()
                del running, connection
                gc.collect()
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            meet(store_path, rank, world)
        else:
            meet(store_path, rank, world)
            running = connection.group.submit(**call)
        running.wait()
        running.rethrow()
        assert (data == 2).all()
        connection.close()
        return failure(connection)

    assert start_gang(body, 2, nodes).results() == [None, None]


@pytest.mark.sample(2, 2)
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("at_exit", [False, True])
def test_a_clean_end_raises_nothing_anywhere(
    start_gang: Callable[..., Any], store_path: str, nodes: int, at_exit: bool
) -> None:
    def body(rank: int, world: int) -> Any:
        connection = connect(store_path, rank, world)
        meet(store_path, rank, world)
        if rank != 0:  # one after the other, as they come
            atexit._run_exitfuncs() if at_exit else connection.close()
        else:
            neighbours = {b for a, b in connection.topology.control_links() if a == 0}
            while not connection.watch.left_ranks() >= neighbours:
                os.sched_yield()
        return failure(connection), connection.watch.failed_ranks()

    assert start_gang(body, 6, nodes).results() == [(None, set())] * 6


@pytest.mark.parametrize("nodes", [1, 3])
def test_an_announced_error_is_raised_alike_on_every_rank(
    start_gang: Callable[..., Any], store_path: str, nodes: int
) -> None:
    text = "ranks disagree: rank 2 calls allreduce #1, rank 3 calls barrier #1"

    def body(rank: int, world: int) -> Any:
        connection = connect(store_path, rank, world)
        meet(store_path, rank, world)
        if rank == 2:
            connection.watch.announce(text)
        assert connection.watch.wait(LIMIT_S)
        error = failure(connection)
        # nobody is gone before all have heard
        connection.watch.leave()
        return type(error), str(error)

    assert start_gang(body, 6, nodes).results() == [(CollectiveError, text)] * 6


def test_a_rank_that_dies_while_others_connect_is_named(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        if rank == 2:
            info = establish.RankInfo("m", "elsewhere", "", "127.0.0.1", 1)  # nobody listens there
            store = dist.FileStore(store_path, world)
            PeerExchange(store, rank, world, 60.0).publish(info)
            return None
        with pytest.raises(RankFailed) as caught:
            connect(store_path, rank, world, timeout_s=5.0 if rank == 0 else 60.0)
        return caught.value.rank

    # The later rank of a pair dials: rank 3 finds nobody and tells the others, who wait for rank 2.
    assert start_gang(body, 4, 1).results() == [2, 2, None, 2]


def test_a_rank_that_is_gone_is_noticed_by_those_who_wait_for_its_call(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        store = dist.FileStore(store_path, world)
        if rank == 1:  # shows its info and is never heard of again
            info = establish.RankInfo("m", "elsewhere", "", "127.0.0.1", 1)
            PeerExchange(store, rank, world, 60.0).publish(info)
            return None
        with pytest.raises(RankFailed) as caught:
            connect(store_path, rank, world)
        return caught.value.rank

    assert start_gang(body, 2, 1).results() == [1, None]


def test_a_rank_that_is_frozen_is_waited_for_until_the_timeout(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        store = dist.FileStore(store_path, world)
        with socket.socket() as listener:
            if rank == 1:
                listener.bind(("127.0.0.1", 0))
                listener.listen()
                port = listener.getsockname()[1]
                info = establish.RankInfo("m", "elsewhere", "", "127.0.0.1", port)
                PeerExchange(store, rank, world, 60.0).publish(info)
                store.get("over")
                return None
            with pytest.raises(DeadlineExceeded, match=r"\[1\]"):
                connect(store_path, rank, world, timeout_s=1.0)
            store.set("over", "1")
        return None

    start_gang(body, 2, 1).results()
