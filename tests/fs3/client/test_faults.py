"""What a client sees while storage nodes stop, come back or damage bytes: right bytes, or a typed error."""

import errno
import io
import random
import threading
from pathlib import Path

import pytest
from tests.fs3.client.conftest import CHUNK, SECRET, Cluster

from fireflyer.errors import ConfigError, Corrupted, ProtocolMismatch, Unavailable
from fireflyer.fs3.client import Settings, connect


def test_reads_and_writes_go_on_while_nodes_stop_and_return(cluster: Cluster) -> None:
    """One node at a time; the others serve all chains."""
    rng = random.Random(5)
    model: dict[int, bytes] = {}
    failures: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            with cluster.connect() as fs, fs.open("/a", "wb+") as file:
                while not done.is_set() or len(model) < 20:
                    index = rng.randrange(40)
                    data = rng.randbytes(rng.choice((100, 5000, CHUNK))).ljust(
                        len(model.get(index, b""))
                    )
                    file.pwrite(data, index * CHUNK)
                    model[index] = data
                    check = rng.choice([*model])
                    assert file.pread(len(model[check]), check * CHUNK) == model[check]
        except BaseException as error:  # noqa: BLE001  # the test's thread raises it
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for name in ("n0", "n2"):
        cluster.stop(name)
        cluster.wait_for(1)
        cluster.start(name)
        cluster.wait_for(2)
    done.set()
    thread.join()
    assert not failures, failures
    with cluster.connect() as fs, fs.open("/a") as file:
        for index, data in model.items():
            assert file.pread(len(data), index * CHUNK) == data


def damage(folder: Path, data: bytes) -> int:
    """Flips a bit in each place of a node's files that holds these bytes; how many there were."""
    found = 0
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        at = content.find(data)
        while at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([content[at] ^ 1]))
            found += 1
            at = content.find(data, at + 1)
    return found


def test_damaged_bytes_are_never_returned(cluster: Cluster) -> None:
    data = random.Random(9).randbytes(CHUNK)
    with cluster.connect() as fs:
        with fs.open("/a", "wb") as file:
            file.write(data)
        holders = [
            name for name in cluster.running if damage(cluster.folder(name), data[4096:8192])
        ]
        assert len(holders) == 2
        with fs.open("/a") as file, pytest.raises(Corrupted, match="/a"):
            file.read()
        # As programs know it from a disk.
        with io.BufferedReader(fs.open("/a")) as file, pytest.raises(OSError, match="/a") as caught:
            file.read()
        assert caught.value.errno == errno.EIO
        with fs.open("/a", "rb+") as file:
            with pytest.raises(Corrupted, match="/a"):
                file.pwrite(b"part of a block", 5000)
            file.pwrite(data, 0)  # the whole chunk: nothing of what was damaged is needed
            assert file.read() == data


@pytest.mark.parametrize("heal", ["block", "truncate", "remove"])
def test_what_is_damaged_everywhere_is_healed_by_what_does_not_need_it(
    cluster: Cluster, heal: str
) -> None:
    data = random.Random(11).randbytes(CHUNK)
    with cluster.connect() as fs, fs.open("/a", "wb+") as file:
        file.pwrite(data, 0)
        file.fsync()
        for name in cluster.running:
            damage(cluster.folder(name), data[4096:8192])
        if heal == "block":
            file.pwrite(data[4096:8192], 4096)
            assert file.pread(CHUNK, 0) == data
            return
        if heal == "truncate":
            file.truncate(0)
        else:
            file = fs.open("/a", "wb+")  # removes its chunks
        file.pwrite(b"new", 10)
        assert file.pread(CHUNK, 0) == bytes(10) + b"new"
        file.close()


def test_one_damaged_replica_is_not_seen(cluster: Cluster) -> None:
    data = random.Random(10).randbytes(CHUNK)
    with cluster.connect() as fs:
        with fs.open("/a", "wb") as file:
            file.write(data)
        for name in cluster.running:
            if damage(cluster.folder(name), data[4096:8192]):
                break
        with fs.open("/a") as file:
            for _ in range(8):
                assert file.pread(CHUNK, 0) == data


def test_a_chain_without_nodes_is_named(cluster: Cluster) -> None:
    with (
        cluster.connect(Settings(deadline_s=1.0, attempt_s=0.3)) as fs,
        fs.open("/a", "wb+") as file,
    ):
        file.write(b"x" * CHUNK)
        file.fsync()
        for name in [*cluster.running]:
            cluster.stop(name)
        cluster.wait_until_stopped()
        stopped = r"/a: chain \d+ is stopped: no target of it served within 1 s"
        with pytest.raises(Unavailable, match=f"reading {stopped}"):
            file.pread(10, 0)
        with pytest.raises(Unavailable, match=f"writing {stopped}"):
            file.pwrite(b"y", 0)


def test_connecting_needs_the_secret(cluster: Cluster, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(SECRET[::-1])
    wrong.chmod(0o600)
    with pytest.raises(ProtocolMismatch, match="another secret"):
        connect(cluster.address, secret_file=wrong)
    wrong.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read"):
        connect(cluster.address, secret_file=wrong)
    with pytest.raises(ConfigError, match="invalid address"):
        connect("nowhere", secret_file=cluster.secret_file)
