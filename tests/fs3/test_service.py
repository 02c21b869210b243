"""The storage service on real directories and sockets: chains, routing, leases, garbage."""

import random
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fs3 import frames
from tests.waiting import LIMIT_S, until

from fireflyer._native.fs3 import io
from fireflyer.errors import StorageError

CHAIN = 9
SERVING, WAITING = 0, 4
INODE = 77


class Cluster:
    """Nodes with one target each, told their routing by hand."""

    def __init__(self, folder: Path, count: int, lease: float = 60.0) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder  # a folder per target
        self.nodes = [io.Node(workers=3, buffers=32 << 20) for _ in range(count)]
        self.targets = [256 * (n + 1) for n in range(count)]
        for node, target in zip(self.nodes, self.targets, strict=True):
            node.open(str(folder / str(target)), target, CHAIN, 1)
            for number, other in enumerate(self.targets):
                node.locate(other, number)
        self.version = 0
        self.route(self.targets)
        for node, target in zip(self.nodes, self.targets, strict=True):
            node.lease(lease, [(target, self.version)])

    def open_anew(self, incarnation: int) -> None:
        """Opens the first node's closed target once the last worker that looks at it lets go of it."""
        until(lambda: self._opened(incarnation))

    def _opened(self, incarnation: int) -> bool:
        target = self.targets[0]
        try:
            self.nodes[0].open(str(self.folder / str(target)), target, CHAIN, incarnation)
        except StorageError as error:
            if "in use" not in str(error):
                raise
            return False
        return True

    def route(self, serving: list[int]) -> None:
        """The chain has these members, all SERVING, at the next version."""
        self.version += 1
        members = [(target, SERVING, 1) for target in serving]
        members += [(target, WAITING, 0) for target in self.targets if target not in serving]
        for node, target in zip(self.nodes, self.targets, strict=True):
            node.routing(target, self.version, members)

    @property
    def chain(self) -> tuple[int, int]:
        return CHAIN, self.version

    def join(self) -> None:
        """Connects each node to each other one."""
        for number, node in enumerate(self.nodes):
            for other, peer in enumerate(self.nodes):
                if other != number:
                    ours, theirs = socket.socketpair()
                    for end in (ours, theirs):
                        end.setblocking(False)
                    node.connected(other, ours.detach())
                    peer.serve(theirs.detach())

    def line(self, number: int = 0) -> socket.socket:
        """A client's connection."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        ours.settimeout(LIMIT_S)
        self.nodes[number].serve(theirs.detach())
        return ours

    def close(self) -> None:
        for node in self.nodes:
            node.stop()


@pytest.fixture(params=[1, 2, 3])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, request.param)
    cluster.join()
    yield cluster
    cluster.close()


def test_what_was_acknowledged_is_read_from_every_replica(cluster: Cluster) -> None:
    rng = random.Random(5)
    model: dict[int, bytes] = {}
    with cluster.line() as head:
        for seq in range(1, 120):
            index, offset = rng.randrange(4), rng.randrange(30_000)
            data = rng.randbytes(rng.choice((1, 100, 4096, 20_000, 150_000)))
            status, _, length = frames.write(
                head, cluster.chain, (INODE, index), offset, data, (1, 1, seq)
            )
            old = model.get(index, b"").ljust(offset, b"\0")
            model[index] = old[:offset] + data + old[offset + len(data) :]
            assert (status, length) == (frames.OK, len(model[index]))
    for number in range(len(cluster.nodes)):
        with cluster.line(number) as line:
            for index, data in model.items():
                begin = rng.randrange(len(data))
                end = rng.randrange(begin, len(data)) + 1
                wanted = [(INODE, index, 0, 1 << 20), (INODE, index, begin, end - begin)]
                whole, part = frames.read(line, cluster.chain, wanted)
                assert (whole.status, whole.data) == (frames.OK, data)
                assert part.offset == begin // frames.BLOCK * frames.BLOCK
                assert data[begin:end] in part.data
                assert part.data == data[part.offset : part.offset + len(part.data)]


def test_a_write_that_is_sent_again_is_done_once(cluster: Cluster) -> None:
    with cluster.line() as line:
        first = frames.write(line, cluster.chain, (INODE, 0), 0, b"one", (4, 2, 1))
        assert (
            frames.write(line, cluster.chain, (INODE, 0), 0, b"two", (4, 2, 2))[1] == first[1] + 1
        )
        again = frames.write(line, cluster.chain, (INODE, 0), 0, b"two", (4, 2, 2))
        assert again[:2] == (frames.OK, first[1] + 1)
        assert frames.write(line, cluster.chain, (INODE, 0), 0, b"one", (4, 2, 1))[0] == 2
        assert frames.read(line, cluster.chain, [(INODE, 0, 0, 10)])[0].data == b"two"


def test_nothing_is_served_without_a_lease_or_with_other_routing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    with cluster.line() as line:
        assert frames.write(line, cluster.chain, (1, 0), 0, b"x", (1, 1, 1))[0] == frames.OK
        old = cluster.chain
        cluster.route(cluster.targets)
        for chain in (old, (CHAIN, cluster.version + 1), (CHAIN + 1, cluster.version)):
            assert frames.write(line, chain, (1, 0), 0, b"y", (1, 1, 2))[0] == frames.STALE_ROUTING
            assert frames.read(line, chain, [(1, 0, 0, 9)])[0].status == frames.STALE_ROUTING
        assert frames.read(line, cluster.chain, [(1, 0, 0, 9), (1, 7, 0, 9)])[0].data == b"x"
    cluster.close()
    unleased = Cluster(tmp_path / "other", 1, lease=-1.0)
    with unleased.line() as line:
        assert (
            frames.write(line, unleased.chain, (1, 0), 0, b"x", (1, 1, 1))[0]
            == frames.STALE_ROUTING
        )
        assert frames.read(line, unleased.chain, [(1, 0, 0, 9)])[0].status == frames.STALE_ROUTING
    unleased.close()


def test_several_targets_of_a_chain_in_one_service(tmp_path: Path) -> None:
    """Writes go to the head, reads to all that serve in turn, and the replicas to each other."""
    targets = [256, 257, 258]
    node = io.Node(workers=3, buffers=32 << 20)
    for target in targets:
        node.open(str(tmp_path / str(target)), target, CHAIN, 1)

    def route(version: int, serving: list[int]) -> None:
        members = [(target, SERVING, 1) for target in serving]
        members += [(target, WAITING, 0) for target in targets if target not in serving]
        for target in targets:
            node.routing(target, version, members)
        node.lease(60.0, [(target, version) for target in targets])

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.settimeout(LIMIT_S)
    node.serve(theirs.detach())
    with ours as line:
        for version, serving in enumerate(([257, 258, 256], [258, 256], [256]), start=1):
            route(version, serving)
            text = b"version %d" % version
            for seq in range(2):
                tag = (1, 1, 2 * version + seq)
                assert frames.write(line, (CHAIN, version), (INODE, 0), 0, text, tag)[0] == 0
            for _ in range(2 * len(targets)):
                [found] = frames.read(line, (CHAIN, version), [(INODE, 0, 0, 99)])
                assert (found.status, found.data) == (frames.OK, text)
        node.close(256)
        assert frames.read(line, (CHAIN, 3), [(INODE, 0, 0, 9)])[0].status == frames.STALE_ROUTING
    node.stop()


def test_a_target_is_opened_anew_only_when_nobody_reads_through_it(tmp_path: Path) -> None:
    """Who is slow to take an answer loses its connection when the target is closed."""
    cluster = Cluster(tmp_path, 1)
    node, target = cluster.nodes[0], cluster.targets[0]
    data = bytes(1 << 20)
    with cluster.line() as line, cluster.line() as slow:
        for seq in range(1, 5):
            frames.write(line, cluster.chain, (INODE, seq), 0, data, (1, 1, seq))
        table = b"".join(
            frames.READ.pack(INODE, index, *cluster.chain, 0, 1 << 20, 0) for index in range(1, 5)
        )
        frames.send(slow, frames.READ_KIND, 4, table)
        assert slow.recv(1) == b"F"  # the rest waits
        node.close(target)
        cluster.open_anew(2)
        with pytest.raises(AssertionError, match="closed the connection"):
            frames.exactly(slow, 4 << 20)
    cluster.close()


def test_a_whole_scrub_writes_the_index_anew(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    node, target = cluster.nodes[0], cluster.targets[0]
    with cluster.line() as line:
        frames.write(line, cluster.chain, (INODE, 1), 0, b"bytes", (1, 1, 1))
    folder = tmp_path / str(target)
    assert not [*folder.glob("index-*")]
    after = node.scrub(target, 0, 0, 16)
    assert after == (INODE, 1)
    assert node.scrub(target, *after, 16) == (0, 0)
    assert [*folder.glob("index-*")]
    cluster.close()


def flip(folder: Path, data: bytes) -> None:
    """Another byte in the middle of these, or the old one again where they are flipped."""
    middle = len(data) // 2
    for path in folder.glob("data-*"):
        content = path.read_bytes()
        at = content.find(data[:middle])
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + middle)
                file.write(bytes([content[at + middle] ^ 1]))
            return
    raise AssertionError("the bytes are nowhere")


def whole(cluster: Cluster, number: int, data: bytes) -> bool:
    """Whether this node has these bytes, without telling it anything."""
    with cluster.line(number) as line:
        try:
            found = frames.read(line, cluster.chain, [(INODE, 0, 0, len(data))])[0]
        except AssertionError:
            return False
    return (found.status, found.data) == (frames.OK, data)


def until_whole(cluster: Cluster, number: int, data: bytes) -> None:
    until(lambda: whole(cluster, number, data))


def damaged(cluster: Cluster, number: int) -> tuple[int, int]:
    """What its scrub finds: chunks that are damaged, and not known yet; and chunks read."""
    node, target = cluster.nodes[number], cluster.targets[number]
    before = node.targets()[target]
    node.scrub(target, 0, 0, 100)
    after = node.targets()[target]
    return after["damaged"] - before["damaged"], after["checked"] - before["checked"]


def test_damage_found_while_it_does_not_serve_is_repaired_when_it_does(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    cluster.join()
    data = random.Random(3).randbytes(20_000)
    with cluster.line() as line:
        frames.write(line, cluster.chain, (INODE, 0), 0, data, (1, 1, 1))
    flip(tmp_path / str(cluster.targets[1]), data)
    cluster.route(cluster.targets[:1])
    assert damaged(cluster, 1) == (1, 1)
    cluster.route(cluster.targets)
    until_whole(cluster, 1, data)
    assert damaged(cluster, 1) == (0, 1)
    cluster.close()


def test_what_nobody_could_repair_is_repaired_when_somebody_can(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    cluster.join()
    data = random.Random(4).randbytes(20_000)
    folders = [tmp_path / str(target) for target in cluster.targets]
    with cluster.line() as line:
        frames.write(line, cluster.chain, (INODE, 0), 0, data, (1, 1, 1))
    for folder in folders:
        flip(folder, data)
    assert damaged(cluster, 1) == (1, 1)
    busy = cluster.targets[1]
    deadline = time.monotonic() + LIMIT_S
    while cluster.nodes[1].targets()[busy]["busy_chunks"]:  # the other has no good copy
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not whole(cluster, 0, data)
    assert not whole(cluster, 1, data)
    flip(folders[0], data)  # the disk reads well again
    until_whole(cluster, 1, data)
    cluster.close()


def test_bytes_survive_the_service(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    with cluster.line() as line:
        assert frames.write(line, cluster.chain, (1, 0), 5, b"kept", (1, 1, 1))[0] == frames.OK
    cluster.close()
    cluster = Cluster(tmp_path, 1)
    with cluster.line() as line:
        assert frames.read(line, cluster.chain, [(1, 0, 0, 99)])[0].data == b"\0" * 5 + b"kept"
    cluster.close()


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_refuses_writes_and_goes_on(
    tmp_path: Path, small_disk: Path, full: int
) -> None:
    """Of the head or the other one: what was acknowledged is served, removing makes room again."""
    room = (256 + 12) << 20  # a store leaves 256 MiB for its log and index
    subprocess.run(["mount", "-o", f"remount,size={room}", str(small_disk)], check=True)
    folder = tmp_path / "nodes"
    folder.mkdir()
    (folder / str(256 * (full + 1))).symlink_to(small_disk)
    cluster = Cluster(folder, 2)
    cluster.join()
    data = random.Random(3).randbytes(1 << 20)
    with cluster.line() as line:
        written = 0
        status = frames.OK
        while status == frames.OK and written < 16:
            tag = (1, 1, written + 1)
            status = frames.write(line, cluster.chain, (INODE, written), 0, data, tag)[0]
            written += status == frames.OK
        assert (status, 4 < written < 16) == (frames.NO_SPACE, True)
        for number in range(2):
            with cluster.line(number) as other:
                wanted = [(INODE, index, 0, 1 << 20) for index in range(3)]
                assert all(
                    found.data == data for found in frames.read(other, cluster.chain, wanted)
                )
                missing = frames.read(other, cluster.chain, [(INODE, written, 0, 10)])[0]
                assert missing.status == frames.NOT_FOUND
        for index in range(3):
            tag = (1, 1, 100 + index)
            removed = frames.write(line, cluster.chain, (INODE, index), 0, b"", tag, frames.REMOVE)
            assert removed[0] == frames.OK
        assert frames.write(line, cluster.chain, (INODE, 50), 0, data, (1, 1, 200))[0] == frames.OK
        assert frames.read(line, cluster.chain, [(INODE, 50, 0, 1 << 20)])[0].data == data
    assert not any(report[-1] for node in cluster.nodes for report in node.reports())
    cluster.close()


def test_garbage_closes_the_connection_and_nothing_else(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    rng = random.Random(1)
    good = frames.HEAD.pack(frames.MAGIC, 1, 0, 1, frames.READ.size, 0, 0, 3)
    good += frames.READ.pack(INODE, 0, CHAIN, cluster.version, 0, 10, 0)
    with cluster.line() as keeper:
        assert (
            frames.write(keeper, cluster.chain, (INODE, 0), 0, b"safe", (1, 1, 1))[0] == frames.OK
        )
        for _ in range(300):
            with cluster.line() as line:
                bad = bytearray(good * 2)
                for _ in range(rng.randrange(1, 4)):
                    bad[rng.randrange(len(bad))] = rng.randrange(256)
                line.sendall(bad[: rng.randrange(1, len(bad) + 1)])
                line.shutdown(socket.SHUT_WR)
                while line.recv(1 << 16):
                    pass
        assert frames.read(keeper, cluster.chain, [(INODE, 0, 0, 10)])[0].data == b"safe"
    cluster.close()
