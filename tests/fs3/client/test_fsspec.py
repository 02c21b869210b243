"""Files of fs3 by fsspec: the suites that fsspec has for its drivers, and the readers that stand on it."""

import asyncio
import os
import pickle
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)
from tests.conftest import fork_child
from tests.fs3.client.conftest import Cluster

from fireflyer.fs3.client import Client
from fireflyer.fs3.client.fsspec_driver import Fs3FileSystem

ROOT = Path(__file__).parents[3]


@pytest.fixture
def driver(fs: Client, calm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fs3FileSystem]:
    monkeypatch.setenv("FIREFLYER_FS_SECRET_FILE", str(calm.secret_file))
    made = fsspec.filesystem("fs3", where=calm.address, skip_instance_cache=True)
    yield made
    made.close()


@pytest.fixture
def url(driver: Fs3FileSystem, calm: Cluster) -> Iterator[str]:
    """Of the file system's root; the driver of these URLs is one for the process."""
    made = f"fs3://{calm.address}"
    yield made
    fsspec.url_to_fs(made)[0].close()


class Suite(AbstractFixtures):  # type: ignore[misc]
    @pytest.fixture
    def fs(self, driver: Fs3FileSystem) -> Fs3FileSystem:
        return driver

    @pytest.fixture
    def fs_path(self) -> str:
        return "/place"

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)


@pytest.mark.full
class TestCopy(AbstractCopyTests, Suite):  # type: ignore[misc]
    pass


@pytest.mark.full
class TestGet(AbstractGetTests, Suite):  # type: ignore[misc]
    pass


@pytest.mark.full
class TestPut(AbstractPutTests, Suite):  # type: ignore[misc]
    pass


class TestOpen(AbstractOpenTests, Suite):  # type: ignore[misc]
    pass


class TestPipe(AbstractPipeTests, Suite):  # type: ignore[misc]
    pass


def test_names_are_listed_found_and_matched(driver: Fs3FileSystem) -> None:
    driver.pipe({"/d/a.txt": b"1", "/d/b.bin": b"22", "/d/e/c.txt": b"333"})
    driver.client.symlink("e", "/d/link")
    driver.client.symlink("a.txt", "/d/same")
    assert driver.ls("/d", detail=False) == ["/d/a.txt", "/d/b.bin", "/d/e", "/d/link", "/d/same"]
    types = {one["name"]: (one["type"], one["size"]) for one in driver.ls("d/")}
    assert types == {
        "/d/a.txt": ("file", 1),
        "/d/b.bin": ("file", 2),
        "/d/e": ("directory", 0),
        "/d/link": ("link", 0),
        "/d/same": ("file", 1),
    }
    assert driver.info("/d/link")["destination"] == "e"
    assert driver.isdir("/d/link")
    assert driver.glob("/d/**/*.txt") == ["/d/a.txt", "/d/e/c.txt"]
    assert driver.glob("/d/?.*") == ["/d/a.txt", "/d/b.bin"]
    assert driver.find("/d") == [f"/d/{n}" for n in ("a.txt", "b.bin", "e/c.txt", "link", "same")]
    assert driver.find("/d", maxdepth=1, withdirs=True)[0] == "/d"
    assert driver.find("/none") == []
    assert [(top, sorted(dirs), sorted(names)) for top, dirs, names in driver.walk("/d")] == [
        ("/d", ["e"], ["a.txt", "b.bin", "link", "same"]),
        ("/d/e", [], ["c.txt"]),
    ]
    assert driver.du("/d/e") == 3
    assert driver.du("/d", total=False)["/d/b.bin"] == 2
    with pytest.raises(FileNotFoundError):
        driver.ls("/none")


def test_trees_are_moved_in_one_step_and_removed_without_following_links(
    driver: Fs3FileSystem,
) -> None:
    driver.pipe({f"/t/{n}/f": b"x" for n in range(3)})
    driver.pipe("/kept/f", b"kept")
    driver.client.symlink("/kept", "/t/link")
    number = driver.info("/t")["ino"]
    driver.mv("/t", "/new/place")
    assert driver.info("/new/place")["ino"] == number
    driver.makedirs("/into")
    driver.mv("/new/place", "/into")
    assert driver.exists("/into/place/2/f")
    driver.mv("/into/place/?", "/spread", recursive=True)
    assert driver.find("/spread") == [f"/spread/{n}/f" for n in range(3)]
    with pytest.raises(OSError, match="not empty"):
        driver.rm("/spread")
    driver.rm(["/spread", "/into", "/new"], recursive=True)
    assert driver.find("/", withdirs=True) == ["/", "/kept", "/kept/f"]


def test_ranges_of_many_files_are_one_batch(driver: Fs3FileSystem) -> None:
    data = os.urandom(70_000)
    driver.pipe({"/a": data, "/b": b"short"})
    found = driver.cat_ranges(
        ["/a", "/a", "/b", "/none", "/b"], [5, -10, 1, 0, 9], [40_000, None, 3, 4, 20]
    )
    assert found[:3] == [data[5:40_000], data[-10:], b"ho"]
    assert isinstance(found[3], FileNotFoundError)
    assert found[4] == b""
    assert driver.cat_ranges(["/a", "/b"], 0, 2) == [data[:2], b"sh"]
    with pytest.raises(FileNotFoundError):
        driver.cat_ranges(["/none"], 0, 1, on_error="raise")
    assert driver.cat_file("/a", -5, -1) == data[-5:-1]
    assert driver.cat(["/a", "/b"]) == {"/a": data, "/b": b"short"}
    assert driver.head("/a", 7) == data[:7]


def test_a_transaction_commits_all_files_or_none(driver: Fs3FileSystem) -> None:
    driver.pipe("/a", b"old")
    with driver.transaction:
        with driver.open("/a", "wb") as one, driver.open("/b/c", "w") as two:
            one.write(b"new")
            two.write("text")
        assert driver.cat("/a") == b"old"
        assert not driver.exists("/b/c")
    assert driver.cat(["/a", "/b/c"]) == {"/a": b"new", "/b/c": b"text"}
    with pytest.raises(ZeroDivisionError), driver.transaction:  # noqa: PT012
        with driver.open("/a", "wb") as one:
            one.write(b"lost")
        raise ZeroDivisionError
    assert driver.cat("/a") == b"new"
    assert driver.find("/") == ["/a", "/b/c"]


def test_files_go_through_links_and_fifos(driver: Fs3FileSystem, tmp_path: Path) -> None:
    """Down to this machine, up, from one place of the file system to another, and in a transaction."""
    driver.pipe("/a", b"new")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "old").write_bytes(b"old")
    for to in ("old", "missing"):
        link = tmp_path / f"to-{to}"
        link.symlink_to(f"kept/{to}")
        driver.get("/a", str(link))
        assert os.readlink(link) == f"kept/{to}"
        assert (tmp_path / "kept" / to).read_bytes() == b"new"
    os.mkfifo(tmp_path / "fifo")
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit((tmp_path / "fifo").read_bytes)
        driver.get("/a", str(tmp_path / "fifo"))
        assert reader.result() == b"new"
    driver.makedirs("/kept")
    driver.client.symlink("kept/file", "/link")
    for change, expected in (
        (lambda: driver.put(str(tmp_path / "kept" / "old"), "/link"), b"new"),
        (lambda: driver.pipe("/link", b"piped"), b"piped"),
        (lambda: driver.copy("/a", "/link"), b"new"),
        (lambda: in_a_transaction(driver, "/link"), b"committed"),
    ):
        change()
        assert driver.client.readlink("/link") == "kept/file"
        assert driver.cat("/kept/file") == expected


def in_a_transaction(driver: Fs3FileSystem, path: str) -> None:
    with driver.transaction, driver.open(path, "wb") as file:
        file.write(b"committed")


def test_files_are_text_appended_and_updated_in_place(driver: Fs3FileSystem, url: str) -> None:
    with fsspec.open(f"{url}/deep/er/f", "w", encoding="utf-8") as file:
        file.write("für\nalle\n")
    with driver.open("/deep/er/f", "ab") as file:
        file.write(b"end")
    with driver.open("/deep/er/f", "r+b") as file:
        file.seek(5)
        file.write(b"A")
    with fsspec.open(f"{url}/deep/er/f", "r", encoding="utf-8") as file:
        assert file.readlines() == ["für\n", "Alle\n", "end"]
    before = driver.ukey("/deep/er/f")
    driver.touch("/deep/er/f", truncate=False)
    assert driver.size("/deep/er/f") == 13
    driver.touch("/deep/er/f")
    assert driver.size("/deep/er/f") == 0
    assert driver.ukey("/deep/er/f") != before
    assert driver.unstrip_protocol("/deep") == f"{url}/deep"


def test_coroutines_read_and_write(calm: Cluster, driver: Fs3FileSystem) -> None:
    async def work() -> list[Any]:
        there = Fs3FileSystem(calm.address, asynchronous=True, skip_instance_cache=True)
        await there._pipe({f"/n{n}": bytes([n]) * n for n in range(5)})
        async with await there.open_async("/n3", "ab") as file:
            await file.write(b"more")
        async with await there.open_async("/n3") as file:
            await file.seek(2)
            last = await file.read()
        found = await there._cat_ranges(["/n1", "/n4"], 0, 2)
        names = await there._glob("/n*")
        await there._rm("/n*")
        there.close()
        return [last, found, names]

    last, found, names = asyncio.run(work())
    assert last == b"\x03more"
    assert found == [b"\x01", b"\x04\x04"]
    assert names == [f"/n{n}" for n in range(5)]
    assert driver.ls("/") == []


def test_a_copy_in_another_process_connects_anew(driver: Fs3FileSystem) -> None:
    driver.pipe("/f", b"bytes")
    again = pickle.loads(pickle.dumps(driver))
    assert again.cat("/f") == b"bytes"
    again.close()

    def child() -> None:
        assert driver.cat("/f") == b"bytes"
        assert driver.glob("/*") == ["/f"]
        driver.pipe("/child", b"here")
        driver.close()

    _, status = os.waitpid(fork_child(child), 0)
    assert status == 0
    assert driver.cat("/child") == b"here"


def test_pyarrow_reads_and_writes_datasets(url: str) -> None:
    table = pa.table({"key": [n % 3 for n in range(1000)], "value": list(range(1000))})
    place, path = fsspec.url_to_fs(f"{url}/set")
    pyarrow.dataset.write_dataset(
        table, path, filesystem=place, format="parquet", partitioning=["key"]
    )
    read = pyarrow.dataset.dataset(path, filesystem=place, partitioning=["key"])
    found = read.to_table(filter=pyarrow.dataset.field("key") == 1)
    assert sorted(found["value"].to_pylist()) == list(range(1, 1000, 3))
    pyarrow.parquet.write_table(table, "/one.parquet", filesystem=place)
    assert pyarrow.parquet.read_table("/one.parquet", filesystem=place).equals(table)


def test_torch_and_safetensors_load_what_they_saved(url: str) -> None:
    tensors = {"weight": torch.arange(10_000, dtype=torch.float32), "bias": torch.zeros(3)}
    with fsspec.open(f"{url}/model.pt", "wb") as file:
        torch.save(tensors, file)
    with fsspec.open(f"{url}/model.pt", "rb") as file:
        assert torch.equal(torch.load(file)["weight"], tensors["weight"])
    with fsspec.open(f"{url}/model.safetensors", "wb") as file:
        file.write(safetensors.torch.save(tensors))
    place, path = fsspec.url_to_fs(f"{url}/model.safetensors")
    loaded = safetensors.torch.load(place.cat(path))
    assert torch.equal(loaded["weight"], tensors["weight"])
    assert torch.equal(loaded["bias"], tensors["bias"])


@pytest.mark.full
@pytest.mark.deadline(300)
def test_pandas_polars_duckdb_and_datasets_write_and_read(
    calm: Cluster, url: str, tmp_path: Path
) -> None:
    python = ROOT / "build" / "callbacks" / "bin" / "python"
    if not python.exists():
        pytest.skip("pandas is not installed: scripts/setup.sh --all-test-packages")
    run = subprocess.run(
        [python, "-m", "tests.fs3.client.reader_runs", url],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(tmp_path),
            "FIREFLYER_FS": calm.address,
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.split("\n")[:-1] == [
        f"{name}: ok" for name in ("pandas", "polars", "duckdb", "datasets")
    ]


def test_urls_name_servers_and_paths() -> None:
    one, two = "fs3://[::1]:4500,h:4501/a/b", "fs3:///a/b"
    assert Fs3FileSystem._get_kwargs_from_urls(one) == {"where": "[::1]:4500,h:4501"}
    assert Fs3FileSystem._get_kwargs_from_urls(two) == {}
    for url in (one, two, "fs3://a/b", "a/b/", "/a/b"):
        assert Fs3FileSystem._strip_protocol(url) == "/a/b"
    assert Fs3FileSystem._strip_protocol("fs3://h:1") == "/"
    assert Fs3FileSystem("fs").unstrip_protocol("a") == "fs3:///a"
    assert Fs3FileSystem("h:1").unstrip_protocol("/a") == "fs3://h:1/a"


def test_a_file_system_that_is_not_there_is_named(tmp_path: Path) -> None:
    driver = Fs3FileSystem(str(tmp_path / "none"), skip_instance_cache=True)
    with pytest.raises(Exception, match=r"none does not exist"):
        driver.ls("/")
