"""Request to send, as the service sees it: what is held until `go`, what is not, and who pays for it."""

import random
import socket
from pathlib import Path

import pytest
from tests.fs3 import frames
from tests.fs3.test_local import put
from tests.fs3.test_service import INODE, Cluster
from tests.waiting import until

CHUNK = 1 << 20
MOST = 16
"""Frames that are held for a connection."""
CLOSED = "closed the connection"


def ask(
    line: socket.socket, cluster: Cluster, request: int, indexes: list[int], length: int = CHUNK
) -> None:
    table = b"".join(frames.READ.pack(INODE, n, *cluster.chain, 0, length, 0) for n in indexes)
    frames.send(line, frames.READ_KIND, len(indexes), table, flags=frames.HOLD, request=request)


def hear(line: socket.socket) -> tuple[int, int, bytes, bytes]:
    """Kind, request, table, payload."""
    _, kind, _, _, table, _, payload, request = frames.HEAD.unpack(
        frames.exactly(line, frames.HEAD.size)
    )
    return kind, request, frames.exactly(line, table), frames.exactly(line, payload)


def go(line: socket.socket, request: int) -> None:
    frames.send(line, frames.GO_KIND, 1, b"", request=request)


def ready(cluster: Cluster) -> int:
    return cluster.nodes[0].statistics()["ready"]


def until_counted(cluster: Cluster, key: str, value: int) -> None:
    until(lambda: cluster.nodes[0].statistics()[key] == value)


@pytest.fixture
def data() -> bytes:
    return random.Random(7).randbytes(CHUNK)


def test_bytes_come_after_go_and_in_its_order(tmp_path: Path, data: bytes) -> None:
    cluster = Cluster(tmp_path, 1)
    with cluster.line() as line:
        put(line, cluster, 0, data, 1)
        put(line, cluster, 1, data[::-1], 2)
        for request, index in ((5, 0), (6, 1), (7, 0)):
            ask(line, cluster, request, [index])
        assert {hear(line)[:2] for _ in range(3)} == {(frames.READY_KIND, n) for n in (5, 6, 7)}
        assert ready(cluster) == 3
        assert frames.read(line, cluster.chain, [(INODE, 0, 0, 99)])[0].data == data[:4096]
        for request, expected in ((6, data[::-1]), (7, data), (5, data)):
            go(line, request)
            kind, its, _, payload = hear(line)
            assert (kind, its, payload) == (frames.READ_ANSWER_KIND, request, expected)
        assert ready(cluster) == 0
    cluster.close()


def test_a_frame_of_many_pieces_is_held_as_one(tmp_path: Path, data: bytes) -> None:
    cluster = Cluster(tmp_path, 1)
    with cluster.line() as line:
        small = [data[n << 14 : (n << 14) + 9000] for n in range(20)]
        for n, part in enumerate(small):
            put(line, cluster, n, part, n + 1)
        ask(line, cluster, 3, [*range(20), 99], 9000)
        assert hear(line) == (frames.READY_KIND, 3, b"", b"")
        assert cluster.nodes[0].statistics()["buffer_bytes"] == 0  # held in the page cache
        go(line, 3)
        assert hear(line)[3] == b"".join(small)
    cluster.close()


def test_little_is_answered_at_once(tmp_path: Path, data: bytes) -> None:
    cluster = Cluster(tmp_path, 1)
    with cluster.line() as line:
        put(line, cluster, 0, data[: 64 << 10], 1)
        for request, index, expected in ((1, 0, data[: 64 << 10]), (2, 99, b"")):
            ask(line, cluster, request, [index])
            kind, its, _, payload = hear(line)
            assert (kind, its, payload) == (frames.READ_ANSWER_KIND, request, expected)
    cluster.close()


def test_beyond_the_bound_it_is_answered_at_once(tmp_path: Path, data: bytes) -> None:
    cluster = Cluster(tmp_path, 1)
    with cluster.line() as line:
        put(line, cluster, 0, data, 1)
        for request in range(MOST):
            ask(line, cluster, request, [0])
        assert {hear(line)[:2] for _ in range(MOST)} == {
            (frames.READY_KIND, request) for request in range(MOST)
        }
        for request in (MOST, 3):  # one too many; a number that is held
            ask(line, cluster, request, [0])
            kind, its, _, payload = hear(line)
            assert (kind, its, payload) == (frames.READ_ANSWER_KIND, request, data)
        go(line, 3)
        assert hear(line)[3] == data
        assert ready(cluster) == MOST - 1
    cluster.close()


def test_go_for_what_is_not_held_ends_the_connection(tmp_path: Path, data: bytes) -> None:
    cluster = Cluster(tmp_path, 1)
    with cluster.line() as line:
        put(line, cluster, 0, data, 1)
    for refused, before in enumerate(([], [5], [5, 5]), start=1):
        with cluster.line() as line:
            if before:
                ask(line, cluster, 5, [0])
                assert hear(line)[0] == frames.READY_KIND
            for request in before[1:]:
                go(line, request)
                assert hear(line)[3] == data
            go(line, 5 if len(before) == 2 else 6)
            with pytest.raises(AssertionError, match=CLOSED):
                frames.exactly(line, 1)
        until_counted(cluster, "refused", refused)
    until_counted(cluster, "ready", 0)
    with cluster.line() as line:
        frames.send(line, frames.READY_KIND, 1, b"")  # says a service, not a client
        with pytest.raises(AssertionError, match=CLOSED):
            frames.exactly(line, 1)
    cluster.close()


def test_clients_that_never_say_go_keep_nobody_waiting(tmp_path: Path, data: bytes) -> None:
    """More is held than the service has buffers for; what a dead client held is let go."""
    cluster = Cluster(tmp_path, 1)
    lines = [cluster.line() for _ in range(4)]
    put(lines[0], cluster, 0, data, 1)
    for line in lines:
        for request in range(MOST):
            ask(line, cluster, request, [0])
    for line in lines:
        assert [hear(line)[0] for _ in range(MOST)] == [frames.READY_KIND] * MOST
    counts = cluster.nodes[0].statistics()
    assert counts["ready"] == 4 * MOST
    assert counts["ready"] * CHUNK > counts["buffer_limit"]
    with cluster.line() as other:
        put(other, cluster, 1, data[::-1], 2)
        ask(other, cluster, 1, [1])
        assert hear(other)[0] == frames.READY_KIND
        go(other, 1)
        assert hear(other)[3] == data[::-1]
    for number, line in enumerate(lines, start=1):
        line.close()
        until_counted(cluster, "ready", (4 - number) * MOST)
    cluster.close()


def test_what_is_written_meanwhile_changes_nothing_that_is_held(
    tmp_path: Path, data: bytes
) -> None:
    cluster = Cluster(tmp_path, 1)
    with cluster.line() as line:
        put(line, cluster, 0, data, 1)
        ask(line, cluster, 1, [0])
        assert hear(line)[0] == frames.READY_KIND
        for seq in range(2, 6):
            put(line, cluster, 0, bytes([seq]) * CHUNK, seq)
        cluster.route(cluster.targets)  # and the chain is another one
        go(line, 1)
        _, _, table, payload = hear(line)
        crcs = table[frames.READ_ANSWER.size :]
        assert payload == data
        assert [int.from_bytes(crcs[n : n + 4], "little") for n in range(0, len(crcs), 4)] == (
            frames.pieces(0, data)
        )
    cluster.close()


def test_a_target_is_opened_anew_while_its_bytes_are_held(tmp_path: Path, data: bytes) -> None:
    """They are let go, and read again when the client wants them."""
    cluster = Cluster(tmp_path, 1)
    node, target = cluster.nodes[0], cluster.targets[0]
    with cluster.line() as line:
        put(line, cluster, 0, data, 1)
        for request in (1, 2):
            ask(line, cluster, request, [0])
            assert hear(line)[0] == frames.READY_KIND
        node.close(target)
        go(line, 1)
        kind, _, table, payload = hear(line)
        assert (kind, payload) == (frames.READ_ANSWER_KIND, b"")
        assert frames.READ_ANSWER.unpack(table)[5] == frames.STALE_ROUTING
        cluster.open_anew(2)
        cluster.version += 1
        node.routing(target, cluster.version, [(target, 0, 2)])
        node.lease(60.0, [(target, cluster.version)])
        go(line, 2)  # its READ names the old version of the chain
        assert frames.READ_ANSWER.unpack(hear(line)[2])[5] == frames.STALE_ROUTING
        ask(line, cluster, 3, [0])
        assert hear(line)[0] == frames.READY_KIND
        go(line, 3)
        assert hear(line)[3] == data
    cluster.close()
