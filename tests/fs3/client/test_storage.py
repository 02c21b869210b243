"""A directory of fs3 as a place for checkpoints and datasets, opened by its URL."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import fork_child
from tests.fs3.client.conftest import Cluster

from fireflyer._native import crc32, crc32c
from fireflyer.datasets import Catalog
from fireflyer.errors import ConfigError, Corrupted, StorageError, Unavailable
from fireflyer.ffrecord import FileWriter, RemoteFiles
from fireflyer.fs3.client import Client
from fireflyer.fs3.client.storage import Fs3Storage
from fireflyer.storage import Storage, open_storage, read_summed


@pytest.fixture
def url(fs: Client, calm: Cluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a directory that is emptied with the rest."""
    monkeypatch.setenv("FIREFLYER_FS_SECRET_FILE", str(calm.secret_file))
    return f"fs3://{calm.address}/place/of/tests"


@pytest.fixture
def storage(url: str) -> Iterator[Storage]:
    opened = open_storage(url)
    assert isinstance(opened, Fs3Storage)
    yield opened
    opened.close()


def test_written_files_are_read_listed_renamed_deleted(storage: Storage) -> None:
    storage.write("a/b/one", [b"hello ", memoryview(b"world")])
    storage.write("a/two", iter([bytearray(b"x")]))
    assert storage.size("a/b/one") == 11
    assert storage.size("a/absent") is None
    assert storage.size("a/two/below") is None
    assert storage.read("a/b/one", 6) == b"world"
    assert storage.read("a/b/one", 9, 100) == b"ld"
    assert storage.list("a") == ["b", "two"]
    assert storage.list("nothing/here") == []
    storage.rename("a/b/one", "c/d/three")
    assert storage.size("a/b/one") is None
    assert storage.read("c/d/three") == b"hello world"
    storage.delete("c")
    assert storage.read("c/d/three") == b"hello world"
    for name in ("a/two", "a/two", "never/was", "a/b", "a"):
        storage.delete(name)
    assert storage.list() == ["c"]


def test_a_url_without_a_host_is_in_the_file_system_that_the_environment_names(
    storage: Storage, calm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write("f", [b"x"])
    monkeypatch.setenv("FIREFLYER_FS", calm.address)
    again = open_storage("fs3:///place/of/tests")
    assert isinstance(again, Fs3Storage)
    assert again.read("f") == b"x"
    again.close()
    monkeypatch.delenv("FIREFLYER_FS")
    with pytest.raises(ConfigError, match="FIREFLYER_FS"):
        open_storage("fs3:///place/of/tests")


def test_write_replaces_and_create_does_not(storage: Storage) -> None:
    storage.write("f", [b"first"])
    before = storage.stamp("f")
    storage.write("f", [b"second"])
    assert storage.stamp("f") != before
    assert storage.stamp("absent") == ""
    assert not storage.create("f", b"third")
    assert storage.read("f") == b"second"
    assert storage.create("g", b"fourth")
    assert storage.list() == ["f", "g"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(storage: Storage) -> None:
    storage.write("f", [b"old"])

    def chunks() -> Iterator[bytes]:
        yield b"new"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        storage.write("f", chunks())
    assert storage.read("f") == b"old"
    assert storage.list() == ["f"]


def test_ranges_are_read_at_once_and_errors_stand_in_their_places(storage: Storage) -> None:
    storage.write("a", [bytes(range(100))])
    first, missing, short = storage.read_many([("a", 90, 95), ("none", 0, 5), ("a", 98, 200)])
    assert (first, short) == (bytes(range(90, 95)), bytes([98, 99]))
    assert isinstance(missing, StorageError)
    assert not isinstance(missing, Unavailable)
    buffer = bytearray(10)
    storage.read_into("a", 90, memoryview(buffer))
    assert buffer == bytes(range(90, 100))
    with pytest.raises(Corrupted, match="ends at byte 100"):
        storage.read_into("a", 95, memoryview(buffer))
    with pytest.raises(StorageError, match="none"):
        storage.read("none")


def test_checked_segments(storage: Storage) -> None:
    data = np.random.default_rng(1).bytes(100_000)
    storage.write("a", [data])
    storage.write("b", [data[::-1]])
    memory = np.zeros(60_000, np.uint8)
    rows = [(0, 7, 30_000, memory.ctypes.data), (1, 0, 30_000, memory.ctypes.data + 30_000)]
    wanted = [data[7:30_007], data[::-1][:30_000]]
    crcs = np.array([crc32(part) for part in wanted], np.uint32)
    storage.read_checked(["a", "b"], np.array(rows, np.int64), crcs)
    assert memory.tobytes() == b"".join(wanted)
    with pytest.raises(Corrupted) as caught:
        storage.read_checked(
            ["a", "b"], np.array(rows, np.int64), crcs ^ np.array([0, 1], np.uint32)
        )
    assert caught.value.segment == 1
    sums = read_summed(storage, ["a", "b"], np.array(rows, np.int64), [0, 77])
    assert sums == [crc32c(wanted[0]), crc32c(wanted[1], 77)]
    late = np.array([(0, 99_000, 2000, memory.ctypes.data)], np.int64)
    with pytest.raises(Corrupted, match="ends inside"):
        read_summed(storage, ["a"], late, [0])
    with pytest.raises(Corrupted, match="ends inside"):
        storage.read_checked(["a"], late, crcs[:1])


@pytest.mark.parametrize("name", ["/etc", "../up", "a//b", "a/./b", "a/.."])
def test_names_stay_inside_the_root(storage: Storage, name: str) -> None:
    with pytest.raises(ValueError, match="must be relative"):
        storage.read(name)


def test_it_pickles_and_works_in_a_forked_child(storage: Storage) -> None:
    storage.write("f", [b"x"])
    again = pickle.loads(pickle.dumps(storage))
    assert again.read("f") == b"x"
    again.close()

    def child() -> None:
        assert storage.read("f") == b"x"

    assert os.waitstatus_to_exitcode(os.waitpid(fork_child(child), 0)[1]) == 0
    assert storage.read("f") == b"x"


def test_urls_that_lead_nowhere(calm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("fs3://", "fs3:///path", "fs3://nothing/path"):
        with pytest.raises(ConfigError):
            open_storage(url)


def test_checkpoints_are_saved_and_loaded(url: str) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("fireflyer.checkpoint")
    state = {"weight": torch.arange(200_000, dtype=torch.float32), "step": 3}
    manager = checkpoint.CheckpointManager(f"{url}/run")
    manager.save(3, state).wait()
    again = checkpoint.CheckpointManager(f"{url}/run")
    assert again.latest() == 3
    loaded = again.load()
    assert torch.equal(loaded["weight"], state["weight"])
    assert loaded["step"] == 3


def test_record_files_are_read_by_the_url_of_a_host(
    url: str, storage: Storage, tmp_path: Path
) -> None:
    with FileWriter(tmp_path / "a.ffr", 1) as writer:
        writer.write_one(b"sample")
    storage.write("a.ffr", [(tmp_path / "a.ffr").read_bytes()])
    for place in (url, f"{url}/a.ffr"):
        with RemoteFiles(place) as reader:
            assert reader.fnames == [f"{url}/a.ffr"]
            assert reader.read_one(0).tobytes() == b"sample"


def test_datasets_are_published_and_read(url: str, tmp_path: Path) -> None:
    samples = [bytes([number]) * (100 + number) for number in range(50)]
    with FileWriter(tmp_path / "a.ffr", len(samples)) as writer:
        for sample in samples:
            writer.write_one(sample)
    catalog = Catalog(f"{url}/sets", user="ann")
    catalog.publish("small", [tmp_path / "a.ffr"], licence="CC0")
    found = Catalog(f"{url}/sets", user="bob").get("small").open()
    assert [bytes(sample) for sample in found.read([49, 0, 7])] == [samples[n] for n in (49, 0, 7)]
