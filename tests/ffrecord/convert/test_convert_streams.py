"""Results go through links, and into pipes and devices, and replace neither."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from fireflyer.cli.app import run_line
from fireflyer.errors import ConfigError
from fireflyer.ffrecord import FileReader, FileWriter, pack_folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with the rows 0, 1, 2 in a.npy, and an empty folder."""
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.arange(3))
    os.mkdir("real")
    return tmp_path


def ran(line: str, code: int = 0) -> None:
    assert run_line(["record", *line.split()]) == code


def write_file(path: str) -> None:
    with FileWriter(path, 1) as writer:
        writer.write_one(b"x")


def append_file(path: str) -> None:
    with FileWriter(path, version=2) as writer:
        writer.write_one(b"x")
    with FileWriter.append(path) as writer:
        writer.write_one(b"y")


WRITERS: list[tuple[str, Callable[[str], object]]] = [
    ("a.ffr", lambda out: ran(f"pack a.npy -o {out} --force")),
    ("a.jsonl", lambda out: ran(f"convert a.npy -o {out} --force")),
    ("a.tar", lambda out: ran(f"convert a.npy -o {out} --force")),
    ("a.parquet", lambda out: ran(f"convert a.npy -o {out} --force")),
    ("f.ffr", write_file),
    ("g.ffr", append_file),
    ("h.ffr", lambda out: pack_folder("folder", out)),
]


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[name for name, _ in WRITERS])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_file_behind_it_is_replaced(
    here: Path, name: str, write: Callable[[str], object], there: bool
) -> None:
    os.mkdir("folder")
    Path("folder/x").write_text("x")
    if there:
        Path("real", name).write_text("before")
    Path(name).symlink_to(f"real/{name}")
    write(name)
    assert os.readlink(name) == f"real/{name}"
    assert os.listdir("real") == [name]
    assert Path("real", name).read_bytes() not in (b"", b"before")


@pytest.mark.parametrize("kind", ["jsonl", "tar", "parquet"])
def test_an_export_goes_into_a_pipe(here: Path, kind: str, capsys: Any) -> None:
    os.mkfifo("fifo")
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(Path("fifo").read_bytes()))
    reader.start()
    ran(f"convert a.npy -o fifo --to {kind}")
    reader.join()
    ran(f"convert a.npy -o file --to {kind}")
    if kind == "parquet":
        Path("piped").write_bytes(found[0])
        assert parquet.read_table("piped").equals(parquet.read_table("file"))
    elif kind == "jsonl":
        assert found == [Path("file").read_bytes()]
    ran(f"convert a.npy -o /dev/null --to {kind}")
    capsys.readouterr()
    ran(f"convert a.npy -o /dev/full --to {kind}", code=1)
    told = "fireflyer: cannot write /dev/full: No space left on device\n"
    assert capsys.readouterr().err == told
    assert Path("fifo").is_fifo()


def test_standard_output_has_the_rows_alone(here: Path) -> None:
    command = [sys.executable, "-P", "-m", "fireflyer.cli", "record", "convert", "a.npy"]
    with open("out", "wb") as file:
        file.write(b"head\n")
        file.flush()
        subprocess.run([*command, "-o", "/dev/stdout", "--to", "jsonl"], stdout=file, check=True)
    lines = Path("out").read_text().splitlines()
    assert lines == ["head", *(f'{{"data":{n}}}' for n in range(3))]


def test_a_record_file_is_no_stream(here: Path) -> None:
    os.mkfifo("fifo.ffr")
    with pytest.raises(ConfigError, match=r"fifo\.ffr is a pipe or a device, not a file"):
        write_file("fifo.ffr")
    with pytest.raises(ConfigError, match=r"fifo\.ffr is a pipe or a device, not a file"):
        pack_folder("real", "fifo.ffr")
    ran("pack a.npy -o fifo.ffr --force", code=1)
    assert Path("fifo.ffr").is_fifo()
    assert sorted(os.listdir()) == ["a.npy", "fifo.ffr", "real"]


@pytest.mark.parametrize("url", ["fs3:///u.tar", "fs3://h:1/u.ffr", "s3://bucket/u.jsonl"])
def test_a_url_is_no_place_for_a_result(here: Path, url: str, capsys: Any) -> None:
    for line in (f"convert a.npy -o {url}", f"pack a.npy -o {url} --files 2"):
        ran(line, code=1)
        assert "is a URL, and results are files of this machine" in capsys.readouterr().err


def test_parts_in_a_linked_folder(here: Path) -> None:
    Path("link").symlink_to("real")
    ran("pack a.npy -o link --files 3")
    assert os.readlink("link") == "real"
    with FileReader([f"real/PART_{n:05d}.ffr" for n in range(3)]) as reader:
        assert reader.n == 3
