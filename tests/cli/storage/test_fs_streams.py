"""`fireflyer fs` through links, pipes, FIFOs and devices, and over several names of which one fails."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fireflyer.cli.app import run_line
from fireflyer.fs3.client import Client
from fireflyer.fs3.client.discovery import VARIABLE, announce, attach
from fireflyer.fs3.config import embed
from fireflyer.fs3.process import ALL, Process

DATA = random.Random(5).randbytes((5 << 20) + 3)


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
def fs(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A file system with DATA in /a, and an empty current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, str(served))
    with attach() as client:
        for name in client.listdir("/"):
            assert run_line(["fs", "rm", "-r", f"/{name}"]) == 0
        with client.open("/a", "wb") as file:
            file.write(DATA)
        yield client


def ran(*arguments: str, code: int = 0) -> None:
    assert run_line(["fs", *arguments]) == code


def read(fs: Client, path: str) -> bytes:
    with fs.open(path, "rb") as file:
        return bytes(file.read())


@pytest.mark.parametrize("to", ["file", "missing", "chain"])
def test_get_writes_through_a_link(fs: Client, to: str) -> None:
    os.mkdir("real")
    Path("real/file").write_text("before")
    Path("real/chain").symlink_to("file")
    Path("link").symlink_to(f"real/{to}")
    ran("get", "/a", "link")
    assert os.readlink("link") == f"real/{to}"
    assert Path("link").read_bytes() == DATA
    assert not Path(os.path.realpath("link")).is_symlink()
    assert len(os.listdir("real")) == (3 if to == "missing" else 2)


def test_a_tree_goes_through_the_links_in_its_way(fs: Client) -> None:
    for path in ("tree/sub/x", "other"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("before")
    Path("tree/sub/link").symlink_to("../../other")
    Path("in/sub").mkdir(parents=True)
    Path("in/sub/link").write_text("after")
    ran("put", "-r", "in", "/tree")
    ran("get", "-r", "/tree/sub", "tree")
    assert os.readlink("tree/sub/link") == "../../other"
    assert Path("other").read_text() == "after"


@pytest.mark.parametrize("verb", ["put", "cp"])
def test_a_link_in_the_file_system_stays(fs: Client, verb: str) -> None:
    fs.mkdir("/d")
    fs.symlink("d/file", "/link")
    fs.symlink("/link", "/first")
    Path("new").write_bytes(b"new")
    ran(*(["put", "new", "/first"] if verb == "put" else ["cp", "/a", "/first"]))
    assert (fs.readlink("/first"), fs.readlink("/link")) == ("/link", "d/file")
    assert read(fs, "/d/file") == (b"new" if verb == "put" else DATA)
    assert fs.listdir("/d") == ["file"]
    fs.symlink("round", "/round")
    ran("put", "new", "/round", code=1)


def test_a_fifo_and_a_device_are_written_and_stay(fs: Client, capsys: Any) -> None:
    os.mkfifo("fifo")
    Path("link").symlink_to("fifo")
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(Path("fifo").read_bytes()))
    reader.start()
    ran("get", "/a", "link")
    reader.join()
    assert found == [DATA]
    Path("null").symlink_to("/dev/null")
    ran("get", "/a", "null")
    assert os.readlink("null") == "/dev/null"
    capsys.readouterr()
    ran("get", "/a", "/dev/full", code=1)
    assert capsys.readouterr().err == "fireflyer: /dev/full: No space left on device\n"
    assert sorted(os.listdir()) == ["fifo", "link", "null"]


def test_put_reads_pipes_and_fifos_to_their_end(fs: Client, capsys: Any) -> None:
    os.mkfifo("fifo")
    writer = threading.Thread(target=lambda: Path("fifo").write_bytes(DATA))
    writer.start()
    ran("put", "fifo", "/f")
    writer.join()
    assert read(fs, "/f") == DATA
    ran("put", "/dev/null", "/f")
    assert read(fs, "/f") == b""
    os.mkdir("tree")
    os.mkfifo("tree/fifo")
    ran("put", "-r", "tree", "/tree", code=1)
    assert "tree/fifo is neither a file" in capsys.readouterr().err
    ran("put", "-", "/", code=1)
    assert "standard input has no name" in capsys.readouterr().err
    assert fs.listdir("/") == ["a", "f"]


def piped(arguments: str, **streams: Any) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-P", "-m", "fireflyer.cli", "fs", *arguments.split()]
    return subprocess.run(command, check=True, **streams)


def test_standard_streams_go_on_where_they_are(fs: Client) -> None:
    """As a file that a shell redirected, an opening anew would begin at its first byte."""
    with open("in", "wb+") as file:
        file.write(b"head" + DATA)
        file.seek(4)
        piped("put - /b", stdin=file)
    assert read(fs, "/b") == DATA
    with open("out", "wb") as file:
        file.write(b"head")
        file.flush()
        piped("get /b -", stdout=file)
    assert Path("out").read_bytes() == b"head" + DATA


@pytest.mark.parametrize(
    ("line", "done"),
    [
        (["rm", "/nope", "/a"], []),
        (["mkdir", "/a", "/d"], ["a", "d"]),
        (["mv", "/nope", "/a", "/into"], ["into"]),
        (["cp", "/nope", "/a", "/into"], ["a", "into"]),
        (["put", "nope", "local", "/into"], ["a", "into"]),
        (["get", "/nope", "/a", "."], ["a"]),
        (["cat", "/nope", "/a"], ["a"]),
        (["stat", "/nope", "/a"], ["a"]),
        (["du", "/nope", "/a"], ["a"]),
    ],
    ids=lambda value: value[0] if value else "",
)
def test_one_name_that_fails_stops_no_other(
    fs: Client, line: list[str], done: list[str], capsysbinary: Any
) -> None:
    Path("local").write_bytes(b"local")
    if "/into" in line:
        fs.mkdir("/into")
    ran(*line, code=1)
    out, err = capsysbinary.readouterr()
    assert err.count(b"\n") == 1
    assert err.startswith(b"fireflyer: /a: " if line[0] == "mkdir" else b"fireflyer: ")
    names = [name for name in fs.listdir("/") if name != "into" or "/into" in line]
    assert names == done
    if "/into" in line:
        assert fs.listdir("/into") == ["local" if line[0] == "put" else "a"]
    if line[0] == "get":
        assert Path("a").read_bytes() == DATA
    if line[0] == "cat":
        assert out == DATA
    if line[0] in ("stat", "du"):
        assert b"/a" in out
