"""Reads of the own machine, as the service sees them: descriptors, places, what is held, garbage."""

import array
import fcntl
import os
import random
import socket
import struct
from pathlib import Path

import pytest
from tests.fs3 import frames
from tests.fs3.test_service import INODE, Cluster
from tests.waiting import until

LOCAL = 1
PLACE = struct.Struct("<QHB5x")


def ask(
    line: socket.socket, cluster: Cluster, index: int, length: int, done: int
) -> tuple[bytes, list[int], int]:
    """Reads a chunk with the flag; the bytes as its file has them, new descriptors, flags of the answer."""
    entry = frames.READ.pack(INODE, index, *cluster.chain, 0, length, 0)
    head = frames.HEAD.pack(frames.MAGIC, frames.READ_KIND, LOCAL, 1, len(entry), done, 0, 5)
    line.sendall(head + entry)
    head, control, _, _ = line.recvmsg(frames.HEAD.size, socket.CMSG_SPACE(4 * 40))
    files = array.array("i")
    for level, kind, data in control:
        assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        files.frombytes(data)
    _, kind, flags, count, table_bytes, _, payload, _ = frames.HEAD.unpack(head)
    assert (kind, count) == (frames.READ_ANSWER_KIND, 1)
    table = frames.exactly(line, table_bytes)
    data = frames.exactly(line, payload)
    if flags & LOCAL:
        _, _, _, size, crcs, status = frames.READ_ANSWER.unpack_from(table)
        position, slot, fresh = PLACE.unpack_from(table, frames.READ_ANSWER.size + 4 * crcs)
        assert (payload, status, fresh) == (0, frames.OK, len(files))
        assert slot < 32
        if files:
            data = os.pread(files[0], size, position)
    return data, list(files), flags


def put(line: socket.socket, cluster: Cluster, index: int, data: bytes, seq: int) -> None:
    """Writes the beginning of a chunk."""
    done = frames.write(line, cluster.chain, (INODE, index), 0, data, (1, 1, seq))
    assert done[0] == frames.OK


def test_what_a_dead_client_held_is_let_go(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    node = cluster.nodes[0]
    with cluster.line() as writer:
        put(writer, cluster, 0, b"a" * 9000, 1)
        with cluster.line() as line:
            data, (file,), flags = ask(line, cluster, 0, 9000, 0)
            assert (data, flags) == (b"a" * 9000, LOCAL)
            assert node.statistics()["held"] == 1
            assert ask(line, cluster, 0, 9000, 1)[1:] == ([], LOCAL)  # it has the file already
            assert node.statistics()["held"] == 1  # the first answer was counted as done
            for seq in range(2, 30):
                put(writer, cluster, 0, bytes([seq]) * 9000, 2 * seq)
                put(writer, cluster, seq, b"b" * 9000, 2 * seq + 1)
            assert b"a" * 9000 in os.pread(file, 1 << 20, 0)  # nobody wrote there meanwhile
        until(lambda: node.statistics()["held"] == 0)
        os.close(file)
    cluster.close()


def test_descriptors_are_for_reading_only(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    with cluster.line() as line:
        put(line, cluster, 0, b"a" * 9000, 1)
        _, (file,), _ = ask(line, cluster, 0, 9000, 0)
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(file, b"x", 0)
        os.close(file)
    cluster.close()


def test_over_tcp_a_read_is_answered_with_bytes(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as line,
    ):
        accepted, _ = server.accept()
        accepted.setblocking(False)
        cluster.nodes[0].serve(accepted.detach())
        put(line, cluster, 0, b"a" * 9000, 1)
        assert ask(line, cluster, 0, 9000, 0) == (b"a" * 9000, [], 0)
        frames.send(line, frames.READ_KIND, 1, frames.READ.pack(INODE, 0, *cluster.chain, 0, 1, 0))
        frames.receive(line)
        entry = frames.READ.pack(INODE, 0, *cluster.chain, 0, 1, 0)  # nothing can be done here
        line.sendall(frames.HEAD.pack(frames.MAGIC, 1, LOCAL, 1, len(entry), 1, 0, 5) + entry)
        assert line.recv(1) == b""
    cluster.close()


def test_a_client_that_is_never_done_gets_bytes_in_the_end(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    with cluster.line() as line:
        put(line, cluster, 0, b"a" * 9000, 1)
        flags = []
        for _ in range(40):
            _, files, one = ask(line, cluster, 0, 9000, 0)
            flags.append(one)
            for file in files:
                os.close(file)
        held = cluster.nodes[0].statistics()["held"]
        assert flags == [LOCAL] * held + [0] * (40 - held)
        assert 0 < held < 40
    cluster.close()


def test_a_target_is_closed_although_a_client_reads_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    node, (target,) = cluster.nodes[0], cluster.targets
    with cluster.line() as line:
        put(line, cluster, 0, b"a" * 9000, 1)
        _, (file,), _ = ask(line, cluster, 0, 9000, 0)
        node.close(target)
        cluster.open_anew(1)
        cluster.route([target])
        node.lease(60.0, [(target, cluster.version)])
        data, (again,), flags = ask(line, cluster, 0, 9000, 1)  # the new store's file is sent anew
        assert (data, flags) == (b"a" * 9000, LOCAL)
        os.close(file)
        os.close(again)
    cluster.close()


def test_garbage_gets_nothing_and_holds_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    rng = random.Random(2)
    entry = frames.READ.pack(INODE, 0, *cluster.chain, 0, 10, 0)
    good = frames.HEAD.pack(frames.MAGIC, 1, LOCAL, 1, len(entry), 0, 0, 3) + entry
    with cluster.line() as keeper:
        put(keeper, cluster, 0, b"safe", 1)
        for _ in range(500):
            with cluster.line() as line:
                bad = bytearray(good * 3)
                for _ in range(rng.randrange(1, 4)):
                    bad[rng.randrange(len(bad))] = rng.randrange(256)
                if rng.randrange(2):
                    struct.pack_into(
                        "<I", bad, len(good) + 12, rng.choice((1, 2, 1 << 31, 2**32 - 1))
                    )
                line.sendall(bad[: rng.randrange(1, len(bad) + 1)])
                line.shutdown(socket.SHUT_WR)
                while line.recv(1 << 16):
                    pass
        until(lambda: cluster.nodes[0].statistics()["held"] == 0)
        assert ask(keeper, cluster, 0, 4, 0)[0] == b"safe"
    cluster.close()
