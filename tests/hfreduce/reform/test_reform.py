"""A group is formed anew by real processes over virtual nodes, without the store."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.hfreduce.conftest import comes_true, connect, die, meet, open_files
from tests.waiting import LIMIT_S

from fireflyer._native import hfreduce as native
from fireflyer.errors import (
    CollectiveError,
    ConfigError,
    DeadlineExceeded,
    PeerLost,
    ProtocolMismatch,
    RankFailed,
)
from fireflyer.hfreduce.reform.membership import Here, Message, Propose
from fireflyer.hfreduce.reform.membership_driver import MembershipDriver, decode
from fireflyer.hfreduce.reform.reform import join, reform
from fireflyer.hfreduce.rendezvous import establish
from fireflyer.hfreduce.rendezvous.establish import Connection
from fireflyer.hfreduce.rendezvous.handshake import Purpose

SECRET = b"of this job"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_SECRET", SECRET.decode())


def total(connection: Connection, value: float = 1.0, count: int = 50_000) -> float:
    """The sum of everybody's value."""
    data = np.full(count, value, np.float32)
    kind, dtype = native.Kind.ALLREDUCE, native.DType.FLOAT32
    if len(connection.topology.hosts) > 1:
        peers = connection.group.peers(kind=kind, count=count, dtype=dtype)
        connection.links.ensure(peers, Purpose.DATA)
    buffers = [(data.ctypes.data, data.nbytes)]
    operation = connection.group.submit(
        kind=kind, inputs=buffers, outputs=buffers, count=count, dtype=dtype, run_here=True
    )
    operation.wait()
    operation.rethrow()
    assert (data == data[0]).all()
    return float(data[0])


def survivor(path: str, rank: int, world: int, victim: int) -> Connection:
    """A group that has worked, and has lost `victim`; that rank dies in here."""
    connection = connect(path, rank, world)
    total(connection)
    meet(path, rank, world)
    if rank == victim:
        die()
    assert connection.watch.wait(LIMIT_S)
    return connection


def before_sending(kind: type[Message], act: Callable[[], None]) -> None:
    """From now on this rank calls `act` before it sends a message of that kind in an agreement."""
    original = MembershipDriver._send

    def send(self: MembershipDriver, rank: int, data: bytes) -> None:
        if isinstance(decode(data[4:]), kind):
            act()
        original(self, rank, data)

    MembershipDriver._send = send  # type: ignore[method-assign]


def until_failure(connection: Connection) -> None:
    while True:
        total(connection)


def wait_for(path: Path) -> str:
    while not path.exists():
        os.sched_yield()
    return path.read_text()


def publish(path: Path, text: str) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)


def test_the_loss_of_rank_0_and_its_host_is_survived_and_a_newcomer_joins(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path
) -> None:
    address = tmp_path / "address"

    def body(rank: int, world: int) -> Any:
        os.environ["FIREFLYER_NODE"] = f"n{rank // 2}"
        if rank == 6:  # on a host of its own
            connection = join([wait_for(address)], SECRET, 60.0)
            sum_of_five = total(connection)
            result = connection.rank, connection.world, connection.epoch, sum_of_five
            connection.close()
            return result
        connection = connect(store_path, rank, 6)
        assert total(connection) == 6
        meet(store_path, rank, 6)
        if rank < 2:
            die()
        with pytest.raises(RankFailed) as caught:
            until_failure(connection)
        assert caught.value.rank in (0, 1)
        connection = reform(connection, 60.0)
        assert (connection.rank, connection.world, connection.epoch) == (rank - 2, 4, 1)
        assert total(connection, rank) == 2 + 3 + 4 + 5
        if connection.rank == 0:
            publish(address, connection.join_address)
        while total(connection, len(connection.slot.join_listener.waiting())) == 0:
            pass
        connection = reform(connection, 60.0)
        sum_of_five = total(connection)
        result = connection.rank, connection.world, connection.epoch, sum_of_five
        connection.close()
        return result

    gang = start_gang(body, 7)
    results = [gang.result(rank) for rank in (2, 3, 4, 5, 6)]
    assert results == [(rank, 5, 2, 5.0) for rank in range(5)]


def test_two_newcomers_of_one_process_are_two_members(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path
) -> None:
    address = tmp_path / "address"

    def newcomer(_: int) -> tuple[int, int, float]:
        connection = join([wait_for(address)], SECRET, 60.0)
        result = connection.rank, connection.world, total(connection)
        connection.close()
        return result

    def body(rank: int, _: int) -> Any:
        if rank == 1:
            with ThreadPoolExecutor(2) as threads:
                return sorted(threads.map(newcomer, range(2)))
        connection = connect(store_path, 0, 1)
        publish(address, connection.join_address)
        assert comes_true(lambda: len(connection.slot.join_listener.waiting()) == 2, 60)
        connection = reform(connection, 60.0)
        result = connection.rank, connection.world, total(connection)
        connection.close()
        return result

    assert start_gang(body, 2).results() == [(0, 3, 3.0), [(1, 3, 3.0), (2, 3, 3.0)]]


def test_a_coordinator_that_dies_in_the_middle_is_replaced(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        connection = survivor(store_path, rank, world, victim=4)
        if rank == 0:
            before_sending(Propose, die)
        connection = reform(connection, 60.0)
        result = connection.rank, connection.world, total(connection)
        connection.close()
        return result

    gang = start_gang(body, 5, 3)
    assert [gang.result(r) for r in (1, 2, 3)] == [(r, 3, 3.0) for r in range(3)]


def test_a_member_that_dies_before_the_new_group_is_up_is_left_out_of_the_next(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        connection = survivor(store_path, rank, world, victim=4)
        if rank == 1:
            establish.RankSlot.move = lambda *_: die()  # type: ignore[method-assign]
        connection = reform(connection, 60.0)
        result = connection.rank, connection.world, connection.epoch, total(connection)
        connection.close()
        return result

    gang = start_gang(body, 5, 3)
    assert [gang.result(r) for r in (0, 2, 3)] == [(r, 3, 2, 3.0) for r in range(3)]


def test_a_frozen_rank_is_left_out_and_told_so_when_it_wakes(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"

    def body(rank: int, world: int) -> Any:
        connection = connect(store_path, rank, world, timeout_s=1.0)
        total(connection)
        meet(store_path, rank, world)
        if rank == 1:
            publish(pid, str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(CollectiveError):
            until_failure(connection)
        if rank == 1:
            with pytest.raises(RankFailed, match="this rank") as caught:
                reform(connection, 60.0)
            return caught.value.rank
        connection = reform(connection, 60.0, grace_s=0.5)
        result = connection.rank, connection.world, total(connection)
        if rank == 0:
            os.kill(int(wait_for(pid)), signal.SIGCONT)
        return result, connection  # lives until the other knows

    def body_and_wait(rank: int, world: int) -> Any:
        result = body(rank, world)
        if rank == 1:
            publish(tmp_path / "told", "yes")
            return result
        wait_for(tmp_path / "told")
        result[1].close()
        return result[0]

    assert start_gang(body_and_wait, 3, 3).results() == [(0, 2, 2.0), 1, (1, 2, 2.0)]


def test_without_a_quorum_nobody_goes_on_unless_it_is_relaxed(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        strict = connect(store_path, rank, world)
        relaxed = connect(store_path + "-relaxed", rank, world)
        total(relaxed)
        meet(store_path, rank, world)
        if rank == 0:
            die()
        with pytest.raises(DeadlineExceeded, match="1 of 2 ranks voted, more than half are"):
            reform(strict, 1.0, grace_s=0.1)
        with pytest.raises(ConfigError, match="quorum"):
            reform(relaxed, 1.0, quorum=3)
        alone = reform(relaxed, 60.0, quorum=1)
        return alone.rank, alone.world, total(alone)

    assert start_gang(body, 2, 2).result(1) == (0, 1, 1.0)


def test_a_group_that_works_may_be_formed_anew_again_and_again(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        connection = connect(store_path, rank, world)
        opened = []  # after each epoch
        for epoch in range(1, 25):
            connection = reform(connection, 60.0)
            assert (connection.epoch, connection.rank, total(connection)) == (epoch, rank, world)
            opened.append(open_files())
        # The lines of past epochs have no descriptor; connections of the last may yet be on their way out.
        as_before = comes_true(lambda: open_files() <= opened[4] + 2)
        meet(store_path, rank, world)
        connection.close()
        with pytest.raises(ConfigError, match="closed"):
            reform(connection, 1.0)
        return as_before

    assert start_gang(body, 3, 2).results() == [True] * 3


def test_who_cannot_join_is_told_why(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path
) -> None:
    def body(rank: int, world: int) -> Any:
        if rank == 0:
            connection = connect(store_path, 0, 1)
            publish(tmp_path / "address", connection.join_address)
            wait_for(tmp_path / "done")
            connection.close()
            publish(tmp_path / "closed", "yes")
            return None
        address = wait_for(tmp_path / "address")
        with pytest.raises(ProtocolMismatch):
            join([address], b"of another job", 10.0)
        with pytest.raises(DeadlineExceeded):
            join([address], SECRET, 0.3)
        with pytest.raises(ConfigError, match="HOST:PORT/NAME"):
            join(["here"], SECRET, 10.0)
        with pytest.raises(ConfigError, match="one group"):
            join([], SECRET, 10.0)
        publish(tmp_path / "done", "yes")
        wait_for(tmp_path / "closed")
        with pytest.raises(PeerLost):
            join([address], SECRET, 10.0)
        return None

    start_gang(body, 2).results()


def test_ranks_may_come_late_to_the_reform(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path
) -> None:
    """The coordinator itself comes last; the others wait for it, as it is alive."""
    asked = tmp_path / "asked"

    def body(rank: int, world: int) -> Any:
        connection = survivor(store_path, rank, world, victim=2)
        if rank == 0:
            wait_for(asked)
        else:
            before_sending(Here, lambda: publish(asked, "yes"))
        connection = reform(connection, 60.0)
        result = connection.rank, connection.world, connection.epoch, total(connection)
        connection.close()
        return result

    gang = start_gang(body, 3, 3)
    assert [gang.result(r) for r in (0, 1)] == [(0, 2, 1, 2.0), (1, 2, 1, 2.0)]
