"""Results go behind links, and into pipes and devices as they come."""

import errno
import os
import threading
from pathlib import Path

import pytest

from fireflyer.cli.app import run_line
from fireflyer.storage.targets import replace_content


@pytest.mark.parametrize("to", ["file", "chain", "missing"])
def test_the_file_behind_a_link_is_replaced(tmp_path: Path, to: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("before")
    (tmp_path / "real" / "chain").symlink_to("file")
    link = tmp_path / "link"
    link.symlink_to(f"real/{to}")
    replace_content(link, b"after")
    assert os.readlink(link) == f"real/{to}"
    names = {"file", "chain", to}
    assert {path.name for path in (tmp_path / "real").iterdir()} == names
    assert (tmp_path / "real" / ("missing" if to == "missing" else "file")).read_bytes() == b"after"


def test_a_reader_of_the_former_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with path.open() as reader:
        replace_content(path, b"after")
        assert (reader.read(), path.read_text()) == ("before", "after")


def test_a_fifo_and_an_open_descriptor_get_the_bytes(tmp_path: Path) -> None:
    fifo, found = tmp_path / "fifo", list[bytes]()
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: found.append(fifo.read_bytes()))
    reader.start()
    replace_content(fifo, b"through")
    reader.join()
    assert found == [b"through"]
    assert fifo.is_fifo()
    with (tmp_path / "log").open("wb") as log:
        log.write(b"before, ")
        log.flush()
        replace_content(f"/dev/fd/{log.fileno()}", b"after")
    assert (tmp_path / "log").read_bytes() == b"before, after"


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_content(tmp_path / "folder", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_link_that_leads_back_to_itself_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = tmp_path / "loop.ffr"
    loop.symlink_to(loop)
    (tmp_path / "rows.jsonl").write_text('{"a": 1}')
    with pytest.raises(OSError, match="symbolic links") as caught:
        replace_content(loop, b"x")
    assert caught.value.errno == errno.ELOOP
    for out in (str(loop), str(loop / ".." / "loop.ffr")):
        assert run_line(["record", "pack", str(tmp_path / "rows.jsonl"), "-o", out]) == 1
        assert "symbolic links" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop.ffr", "rows.jsonl"]
    assert loop.is_symlink()
