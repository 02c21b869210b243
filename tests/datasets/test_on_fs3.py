"""Record files on a file system of our own, by URL: readers, loaders, data sets and the command line."""

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fireflyer.cli.app import run_line
from fireflyer.datasets import Catalog, DistributedLoader
from fireflyer.errors import ConfigError, DeadlineExceeded, StorageError, Unavailable
from fireflyer.ffrecord import (
    ChunkCache,
    FileReader,
    PackedFolder,
    RemoteFiles,
    open_records,
    pack_folder,
)
from fireflyer.ffrecord.torch import DataLoader, Dataset
from fireflyer.fs3.client import Client
from fireflyer.fs3.client.discovery import VARIABLE, announce, attach
from fireflyer.fs3.config import embed
from fireflyer.fs3.process import ALL, Process
from fireflyer.storage import split_url

N = 20
Records = Callable[..., list[Path]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a running file system."""
    folder = tmp_path_factory.mktemp("served")
    config = embed(folder, None, None)
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        announce(folder, process.manager)
        yield folder


@pytest.fixture
def fs(served: Path, records: Records, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A file system that the environment names: p0.ffr and sets/PART_0000{0,1}.ffr, N samples each."""
    monkeypatch.setenv(VARIABLE, str(served))
    with attach() as client:
        client.makedirs("/sets", exist_ok=True)
        places = {"/p0.ffr": records(N, 1)[0]}
        places |= {f"/sets/{path.name}": path for path in records(N, 2, "parts")}
        for name, path in places.items():
            with client.open(name, "wb") as file:
                file.write(path.read_bytes())
        yield client


@pytest.mark.parametrize("url", ["fs3:///p0.ffr", "fs3:///sets", "fs3:///sets/"])
def test_a_file_and_a_folder_are_read(
    fs: Client, number_of: Callable[[Any], int], url: str
) -> None:
    with RemoteFiles(url) as reader:
        assert [number_of(sample) for sample in reader.read([19, 0, 12])] == [19, 0, 12]
        assert all(name.startswith(url.removesuffix("/")) for name in reader.fnames)
        again = pickle.loads(pickle.dumps(reader))
        assert number_of(again.read_one(7)) == 7
        again.close()


def test_the_root_is_a_folder_like_others(fs: Client, number_of: Callable[[Any], int]) -> None:
    with RemoteFiles("fs3:///") as reader:
        assert reader.fnames == ["fs3:///p0.ffr"]
        assert number_of(reader.read_one(3)) == 3


def test_files_of_several_folders_share_a_client(fs: Client) -> None:
    names = ["fs3:///sets/PART_00001.ffr", "fs3:///p0.ffr"]
    with open_records(names) as reader:
        assert isinstance(reader, RemoteFiles)
        assert (reader.n, reader.fnames, len(reader._own)) == (N // 2 + N, names, 1)
    assert not reader._own


def test_a_reader_of_local_files_says_who_reads_urls() -> None:
    with pytest.raises(ConfigError, match="is a URL: read it with open_records"):
        FileReader("fs3:///p0.ffr")


def test_reading_makes_nothing(fs: Client) -> None:
    before = sorted(fs.listdir("/"))
    for url in ("fs3:///typo/p0.ffr", "fs3:///typo.ffr"):
        with pytest.raises(StorageError, match="does not exist"):
            RemoteFiles(url)
    with pytest.raises(ConfigError, match=r"no '\*.ffr' file"):
        RemoteFiles("fs3:///typo")
    assert sorted(fs.listdir("/")) == before


def test_a_cluster_that_is_not_there_is_named(fs: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(servers: list[str]) -> None:
        raise DeadlineExceeded(f"{servers[0]} did not answer")

    monkeypatch.setattr("fireflyer.fs3.client.storage.connect", silent)
    with pytest.raises(Unavailable, match=r"fs3://h:1/: h:1 did not answer"):
        RemoteFiles("fs3://h:1/p0.ffr", attempts=1)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=VARIABLE):
        RemoteFiles("fs3:///p0.ffr")


@pytest.mark.parametrize("place", ["fs3:///sets", ["fs3:///p0.ffr"]])
def test_a_loader_gives_every_sample_once(
    fs: Client, number_of: Callable[[Any], int], tmp_path: Path, place: Any
) -> None:
    cache = ChunkCache(tmp_path / "cache", 1 << 20)
    loaders = [
        DistributedLoader(place, rank, 2, seed=1, batch_size=6, cache=cache) for rank in range(2)
    ]
    found = [number_of(sample) for loader in loaders for batch in loader for sample in batch]
    assert sorted(found) == list(range(N))
    assert loaders[0].dataset_id == loaders[1].dataset_id


def test_a_data_set_of_torch_and_of_a_catalog(fs: Client, records: Records) -> None:
    loader = DataLoader(Dataset("fs3:///sets"), 8)
    assert [len(batch) for batch in loader] == [8, 8, 4]
    catalog = Catalog("fs3:///warehouse", user="ann")
    catalog.publish("small", records(N), licence="CC0")
    with Catalog("fs3:///warehouse", user="ann").get("small").open() as reader:
        assert reader.n == N


def test_a_packed_folder(fs: Client, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"content")
    pack_folder(tmp_path / "in", tmp_path / "in.ffr")
    with fs.open("/in.ffr", "wb") as file:
        file.write((tmp_path / "in.ffr").read_bytes())
    try:
        with PackedFolder("fs3:///in.ffr") as folder:
            assert folder.read_one("a").tobytes() == b"content"
    finally:
        fs.unlink("/in.ffr")


def ran(capsysbinary: Any, line: str, code: int = 0) -> str:
    assert run_line(["record", *line.split()]) == code
    out, err = capsysbinary.readouterr()
    return str((out or err).decode())


def test_the_commands_take_urls(fs: Client, tmp_path: Path, capsysbinary: Any) -> None:
    listed = json.loads(ran(capsysbinary, "ls fs3:///sets fs3:///p0.ffr --json"))
    assert [(each["file"], each["samples"], each["bytes"]) for each in listed] == [
        (f"fs3:///{name}", samples, fs.stat(f"/{name}").st_size)
        for name, samples in (("sets/PART_00000.ffr", 10), ("sets/PART_00001.ffr", 10), ("p0.ffr", 20))
    ]  # fmt: skip
    assert ran(capsysbinary, "verify fs3:///sets") == "2 files, 20 samples: all sound\n"
    assert ran(capsysbinary, "cat fs3:///p0.ffr 3 --as hex").startswith("00000000  03 00")
    copy = tmp_path / "copy.ffr"
    ran(capsysbinary, f"merge fs3:///sets -o {copy}")
    with fs.open("/p0.ffr") as file:
        assert copy.read_bytes() == file.read()
    ran(capsysbinary, f"convert fs3:///p0.ffr -o {tmp_path / 'copy.jsonl'}")
    assert len((tmp_path / "copy.jsonl").read_text().splitlines()) == N
    assert "does not exist" in ran(capsysbinary, "verify fs3:///absent.ffr", 1)
    told = ran(capsysbinary, f"pack fs3:///a.tar -o {tmp_path / 'a.ffr'}", 1)
    assert "only record files can be read by URL" in told


def test_a_damaged_sample_of_a_url_is_reported(fs: Client, capsysbinary: Any) -> None:
    with fs.open("/p0.ffr", "rb+") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    told = ran(capsysbinary, "verify fs3:///p0.ffr", 1)
    assert "fs3:///p0.ffr', sample 19 " in told
    assert told.endswith("1 damage in 1 of 1 files checked\n")


@pytest.mark.parametrize(
    ("url", "parts", "directory"),
    [
        ("fs3:///p0.ffr", ("fs3:///", "p0.ffr"), ("fs3:///", "p0.ffr")),
        ("fs3:///a//b/p0.ffr", ("fs3:///", "a/b/p0.ffr"), ("fs3:///", "a/b/p0.ffr")),
        ("fs3://h:1,g:2/a/p0.ffr", ("fs3://h:1,g:2/", "a/p0.ffr"), ("fs3://h:1,g:2/", "a/p0.ffr")),
        ("s3://b/a/p0.ffr", ("s3://b/a", "p0.ffr"), ("s3://b/a/p0.ffr", "")),
        ("file:///p0.ffr", ("file:///", "p0.ffr"), ("file:///p0.ffr", "")),
        ("memory://p0.ffr", ("memory://", "p0.ffr"), ("memory://p0.ffr", "")),
    ],
)
def test_a_url_is_divided(url: str, parts: tuple[str, str], directory: tuple[str, str]) -> None:
    assert split_url(url) == parts
    assert split_url(url, directory=True) == directory
