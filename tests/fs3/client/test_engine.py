"""The engine's face for Python: errors of connecting, signals, forks, what no batch can be."""

import os
import random
import signal
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.conftest import fork_child

from fireflyer._native.fs3.client import Batch, Engine, FileMap, Outcome
from fireflyer.errors import DeadlineExceeded, PeerLost, ProtocolMismatch

CHAIN, NODE = 1, 7


@pytest.fixture
def silent() -> Iterator[Callable[[int, float], int]]:
    """Connects to a node that never answers."""
    ends: list[socket.socket] = []

    def connect(node: int, seconds: float) -> int:
        assert node == NODE
        assert 0 < seconds <= 1
        mine, other = socket.socketpair()
        ends.append(other)
        return mine.detach()

    yield connect
    for end in ends:
        end.close()


def engine(connect: Callable[[int, float], int]) -> Engine:
    made = Engine(5, connect)
    made.routing([(CHAIN, 3, [NODE])])
    return made


def question() -> Batch:
    return Batch.of_chains(FileMap(9, 4096, [CHAIN]), [(0, 5)])


def test_who_does_not_answer_is_late(silent: Callable[[int, float], int]) -> None:
    batch = question()
    assert engine(silent).query_last(batch, 0.05) == 1
    assert batch.failures() == [(0, Outcome.LATE, CHAIN, NODE)]


@pytest.mark.parametrize("error", [PeerLost, DeadlineExceeded])
def test_who_cannot_be_reached_is_told(error: type[Exception]) -> None:
    def connect(node: int, seconds: float) -> int:
        raise error("nobody is there")

    batch = question()
    assert engine(connect).query_last(batch, 10.0) == 1
    assert batch.failures() == [(0, Outcome.UNREACHABLE, CHAIN, NODE)]


def test_another_error_of_connecting_goes_to_the_caller() -> None:
    def connect(node: int, seconds: float) -> int:
        raise ProtocolMismatch("another secret")

    with pytest.raises(ProtocolMismatch, match="another secret"):
        engine(connect).query_last(question(), 10.0)


def test_a_signal_ends_a_call(silent: Callable[[int, float], int]) -> None:
    class Rang(Exception):
        """Raised by the handler."""

    def ring(*_: object) -> None:
        raise Rang

    old = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Rang):
            engine(silent).query_last(question(), 60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_what_a_handler_raises_while_nobody_is_reached_ends_the_call() -> None:
    """At any moment of a connecting that fails, as it does again and again while a node is away."""

    class Rang(BaseException):
        """Raised by the handler."""

    rung = 0

    def ring(*_: object) -> None:
        nonlocal rung
        rung += 1
        raise Rang

    def connect(node: int, seconds: float) -> int:
        raise PeerLost(f"nobody is at {node}")

    def ask_until(turn: int) -> None:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 1e-3))
        while rung < turn:
            made.query_last(question(), 10.0)

    made = engine(connect)
    chance = random.Random(1)
    old = signal.signal(signal.SIGALRM, ring)
    try:
        for turn in range(1, 301):
            with pytest.raises(Rang):
                ask_until(turn)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_an_engine_belongs_to_its_process(silent: Callable[[int, float], int]) -> None:
    made = engine(silent)

    def child() -> None:
        with pytest.raises(ValueError, match="connect again"):
            made.query_last(question(), 10.0)

    assert os.waitstatus_to_exitcode(os.waitpid(fork_child(child), 0)[1]) == 0


def test_what_no_batch_can_be() -> None:
    files = [FileMap(9, 4096, [CHAIN])]
    memory = bytearray(10)
    with pytest.raises(ValueError, match="file 1"):
        Batch.of_buffers(files, [], [(1, 0, memory)])
    with pytest.raises(ValueError, match="offset -1"):
        Batch(files, np.array([(0, -1, 10, 0)], np.int64))
    with pytest.raises(ValueError, match="beyond the last chunk"):
        Batch.of_buffers(files, [], [(0, 4096 << 32, memory)])
    with pytest.raises(ValueError, match="chunks of 5000"):
        FileMap(9, 5000, [CHAIN])
    with pytest.raises(IndexError):
        Batch.of_buffers(files, [5], [(1, 0, memory)])
    with pytest.raises(ValueError, match="invalid piece 3"):
        question().again(3)
    batch = Batch.of_buffers(files, [5], [(0, 2, memory), (0, 9, memory)])
    assert batch.counts == [3, 0]
    assert len(batch) == 1
