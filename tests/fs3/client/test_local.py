"""A client on the machine of its storage nodes reads their files: same bytes, damage found, nothing torn."""

import random
import socket
import struct
import threading
from pathlib import Path

import pytest
from tests.fs3 import frames
from tests.fs3.client.conftest import CHUNK, Cluster
from tests.fs3.client.test_faults import damage
from tests.waiting import LIMIT_S

from fireflyer.fs3 import same_node
from fireflyer.fs3.client import Client, Settings


def local_bytes(client: Client) -> int:
    return client.statistics()["local_bytes"]


def test_the_same_bytes_either_way(calm: Cluster, fs: Client) -> None:
    rng = random.Random(1)
    data = rng.randbytes(40 * CHUNK + 777)
    with fs.open("/a", "wb") as file:
        file.write(data)
        file.pwrite(b"end", 44 * CHUNK)  # a hole before it
    data = data.ljust(44 * CHUNK, b"\0") + b"end"
    with (
        calm.connect(Settings(local=False)) as far,
        far.open("/a") as bytes_,
        fs.open("/a") as near,
    ):
        for _ in range(20):
            requests = []
            for _ in range(rng.choice((1, 3, 70))):
                begin = rng.randrange(len(data))
                size = rng.choice((1, 4096, 5000, 3 * CHUNK))
                requests.append((begin, bytearray(size), bytearray(size)))
            counts = fs.read_many([(near, begin, one) for begin, one, _ in requests])
            assert counts == far.read_many([(bytes_, begin, other) for begin, _, other in requests])
            for count, (begin, one, other) in zip(counts, requests, strict=True):
                assert one[:count] == other[:count] == data[begin : begin + count]
        assert local_bytes(far) == 0
    assert local_bytes(fs) > 0


def test_damage_is_found_and_repaired(cluster: Cluster) -> None:
    data = random.Random(9).randbytes(CHUNK)
    with cluster.connect() as fs:
        with fs.open("/a", "wb") as file:
            file.write(data)
        for name in cluster.running:
            if damage(cluster.folder(name), data[4096:8192]):
                break
        with fs.open("/a") as file:
            while fs.statistics()["mismatches"] == 0:  # either replica may be asked
                assert file.pread(CHUNK, 0) == data
            clean = 0
            while clean < 30:  # it is repaired before long
                before = fs.statistics()["mismatches"]
                assert file.pread(CHUNK, 0) == data
                clean = clean + 1 if fs.statistics()["mismatches"] == before else 0
        assert local_bytes(fs) > 0


def test_no_read_is_torn_while_chunks_are_overwritten(calm: Cluster, fs: Client) -> None:
    with fs.open("/a", "wb") as file:
        file.write(bytes(4 * CHUNK))
    ends = threading.Event()
    torn: list[bytes] = []

    def read() -> None:
        with calm.connect() as reader, reader.open("/a") as file:
            rng = random.Random(threading.get_ident())
            memory = [bytearray(CHUNK) for _ in range(8)]
            while not ends.is_set():
                reader.read_many([(file, rng.randrange(4) * CHUNK, one) for one in memory])
                torn.extend(bytes(one) for one in memory if one != one[:1] * CHUNK)
            assert local_bytes(reader) > 0

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    with fs.open("/a", "rb+") as file:
        for n in range(400):
            file.pwrite(bytes([n % 251]) * CHUNK, n % 4 * CHUNK)
    ends.set()
    for reader in readers:
        reader.join()
    assert not torn


def sockets(folder: Path) -> list[Path]:
    return [*folder.glob("local-*.sock")]


def test_a_socket_belongs_to_one_process_of_its_node(cluster: Cluster) -> None:
    (first,) = sockets(cluster.folder("n0"))
    cluster.stop("n0")
    assert sockets(cluster.folder("n0")) == []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:  # a killed process leaves its
        killed.bind(str(first))
    cluster.start("n0")
    (second,) = sockets(cluster.folder("n0"))
    assert second != first


def test_without_its_socket_a_node_is_reached_by_its_address(cluster: Cluster) -> None:
    for name in cluster.running:
        for path in sockets(cluster.folder(name)):
            path.unlink()
    with cluster.connect() as fs, fs.open("/a", "wb+") as file:
        file.write(b"x" * CHUNK)
        assert file.pread(CHUNK, 0) == b"x" * CHUNK
        assert local_bytes(fs) == 0


def test_without_a_proof_nothing_is_served(calm: Cluster) -> None:
    (path,) = sockets(calm.folder("n0"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(LIMIT_S)
        line.connect(str(path))
        entry = frames.READ.pack(1, 0, 1, 1, 0, 10, 0)
        line.sendall(frames.HEAD.pack(frames.MAGIC, 1, 1, 1, len(entry), 0, 0, 5) + entry)
        data, control, _, _ = line.recvmsg(1 << 16, socket.CMSG_SPACE(struct.calcsize("40i")))
        assert frames.MAGIC.to_bytes(4, "little") not in data
        assert control == []


def test_whose_machine_a_socket_is_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = same_node.advertised("/a/b.sock")
    assert same_node.reached(told) == "unix:/a/b.sock"
    assert same_node.reached("") == same_node.advertised("") == ""
    other = tmp_path / "boot_id"
    other.write_text("another\n")
    monkeypatch.setattr(same_node, "BOOT_ID", other)
    assert same_node.reached(told) == ""
    monkeypatch.setattr(same_node, "BOOT_ID", tmp_path / "none")
    assert same_node.advertised("/a/b.sock") == same_node.reached(":/a/b.sock") == ""
    assert same_node.new_socket(tmp_path / ("d" * 200)) == ""
