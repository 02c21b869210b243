"""`fireflyer record` as a command: what it prints, its exit codes, and that it leaves nothing half-made."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fireflyer.cli.app import run_line
from fireflyer.ffrecord import FileReader, FileWriter

VERBS = ["pack", "ls", "cat", "verify", "merge", "split", "convert"]
HEAVY = ["torch", "numpy", "rich", "pyarrow", "msgspec", "fireflyer.ffrecord"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with photos/ (2 classes), rows.jsonl and plain.ffr (5 samples)."""
    monkeypatch.chdir(tmp_path)
    for i in range(6):
        path = tmp_path / "photos" / ("ant" if i < 4 else "bee") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes([i]) * 50)
    lines = [{"n": i, "text": f"row {i}"} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with FileWriter(tmp_path / "plain.ffr", 5) as writer:
        for i in range(5):
            writer.write_one(b"sample %d" % i)
    return tmp_path


def ran(capsysbinary: Any, line: str, code: int = 0) -> str:
    """What the command printed; nothing on stderr if it went well."""
    assert run_line(["record", *line.split()]) == code
    out, err = capsysbinary.readouterr()
    assert (err == b"") == (code == 0 or bool(out)), err
    return str(out.decode() or err.decode())


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    script = f"""
import contextlib, io, sys
from fireflyer.cli.app import run_line
for verb in {VERBS!r}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run_line(["record", verb, "--help"]) == 0
    assert f"fireflyer record {{verb}} " in out.getvalue().partition("Options:")[0]
assert not [name for name in {HEAVY!r} if name in sys.modules], sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-P", "-c", script], check=True)


def test_a_folder_of_classes(here: Path, capsysbinary: Any) -> None:
    told = ran(capsysbinary, "pack photos -o photos.ffr")
    assert re.fullmatch(r"6 samples, [\d.]+ KiB: photos\.ffr\n", told)
    (listed,) = json.loads(ran(capsysbinary, "ls photos.ffr --json"))
    assert (listed["samples"], listed["version"], listed["holds"]) == (6, 2, "rows")
    assert [column["name"] for column in listed["columns"]] == ["image", "label", "class", "name"]
    row = json.loads(ran(capsysbinary, "cat photos.ffr 5"))
    assert (row["label"], row["class"], row["name"]) == (1, "bee", "bee/5.png")
    assert run_line(["record", "cat", "photos.ffr", "5", "--column", "image"]) == 0
    assert capsysbinary.readouterr().out == (here / "photos/bee/5.png").read_bytes()
    shown = ran(capsysbinary, "ls photos.ffr")
    assert "image: bytes, label: int64, class: str, name: str" in shown


def test_the_format_of_the_original_keeps_the_tree(here: Path, capsysbinary: Any) -> None:
    ran(capsysbinary, "pack photos -o tree.ffr --format v1")
    (listed,) = json.loads(ran(capsysbinary, "ls tree.ffr --json"))
    assert (listed["samples"], listed["version"], listed["holds"]) == (6, 1, "packed folder")


def test_parts(here: Path, capsysbinary: Any) -> None:
    told = json.loads(ran(capsysbinary, "pack rows.jsonl -o parts --files 3 --json"))
    assert told["files"] == [f"parts/PART_{i:05d}.ffr" for i in range(3)]
    assert ran(capsysbinary, "ls parts").splitlines()[-1].startswith("3 files, 10 samples, ")
    ran(capsysbinary, "pack rows.jsonl -o sized --file-size 30")
    assert FileReader("sized").n == 10
    assert len(os.listdir("sized")) > 1


def test_cat_in_every_form(here: Path, capsysbinary: Any) -> None:
    assert ran(capsysbinary, "cat plain.ffr 3 1") == "sample 3sample 1"
    assert ran(capsysbinary, "cat plain.ffr 3 --as text") == "sample 3\n"
    assert ran(capsysbinary, "cat plain.ffr 3 --as json") == '{"data":"c2FtcGxlIDM="}\n'
    hexed = ran(capsysbinary, "cat plain.ffr 3 --as hex")
    assert hexed == "00000000  73 61 6d 70 6c 65 20 33                          sample 3\n"


def test_convert_there_and_back(here: Path, capsysbinary: Any) -> None:
    ran(capsysbinary, "pack rows.jsonl -o a.ffr --compression zstd")
    ran(capsysbinary, "convert a.ffr -o a.tar")
    ran(capsysbinary, "convert a.ffr -o b.jsonl")
    assert (here / "b.jsonl").read_text().splitlines() == [
        json.dumps({"n": i, "text": f"row {i}"}, separators=(",", ":")) for i in range(10)
    ]
    ran(capsysbinary, "convert a.ffr -o arrays --to npy --columns n")
    np.testing.assert_array_equal(np.load("arrays/n.npy"), np.arange(10))
    ran(capsysbinary, "convert a.tar -o c.ffr --columns text.txt --format v1")
    assert ran(capsysbinary, "cat c.ffr 9") == "row 9"
    ran(capsysbinary, "convert plain.ffr -o plain2.ffr --format v2")
    assert ran(capsysbinary, "cat plain2.ffr 4") == "sample 4"


def test_split_and_merge(here: Path, capsysbinary: Any) -> None:
    ran(capsysbinary, "split plain.ffr -o two --fractions 0.6,0.4 --names train,val --shuffle 1")
    assert sorted(os.listdir("two")) == ["train.ffr", "val.ffr"]
    ran(capsysbinary, "split plain.ffr -o ones --count 1")
    ran(capsysbinary, "merge ones -o whole.ffr")
    assert (here / "whole.ffr").read_bytes() == (here / "plain.ffr").read_bytes()
    assert FileReader(["two/train.ffr"]).n == 3


def test_verify_exits_1_and_names_the_damage(here: Path, capsysbinary: Any) -> None:
    assert ran(capsysbinary, "verify .") == "1 files, 5 samples: all sound\n"
    data = bytearray((here / "plain.ffr").read_bytes())
    data[12 + 60 + 8 * 2] ^= 1
    (here / "plain.ffr").write_bytes(bytes(data))
    told = ran(capsysbinary, "verify plain.ffr", code=1).splitlines()
    assert "'plain.ffr' is damaged: sample 2 " in told[0]
    assert told[1] == "1 damage in 1 of 1 files checked"
    assert json.loads(ran(capsysbinary, "verify . --json", code=1))["bad_files"] == 1
    assert ran(capsysbinary, "verify . --metadata-only") == "1 files, 5 samples: all sound\n"


def test_an_old_file_without_checksum_is_told_in_one_line(here: Path, capsysbinary: Any) -> None:
    data = (here / "plain.ffr").read_bytes()
    (here / "plain.ffr").write_bytes(bytes(4) + data[4:])
    assert run_line(["record", "verify", "plain.ffr"]) == 0
    err = capsysbinary.readouterr().err.decode().splitlines()
    assert err
    assert all(re.fullmatch(r"fireflyer: record file .* old file.*", line) for line in err)


def test_the_preview_page(here: Path, capsysbinary: Any) -> None:
    ran(capsysbinary, "pack photos -o photos.ffr")
    told = ran(capsysbinary, "ls photos.ffr --html page.html --samples 4")
    assert told.splitlines()[-1] == "written: page.html"
    html = (here / "page.html").read_text()
    assert html.count('src="data:image/png;base64,') == 4
    told = ran(capsysbinary, "ls photos.ffr --html page.html", code=1)
    assert (
        told
        == "fireflyer: page.html already exists: use another name, or replace it with --force\n"
    )


@pytest.mark.sample(26)
@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("", 2, "Missing command"),
        ("fly", 2, "No such command 'fly'"),
        ("pack", 2, "Missing argument"),
        ("pack photos", 2, "Missing option '--out'"),
        ("pack photos -o a.ffr --files 0", 2, "--files"),
        ("pack nothing -o a.ffr", 1, "nothing: no such file or folder"),
        ("pack rows.jsonl -o a.bin", 1, "does not end in '.ffr'"),
        ("pack rows.jsonl -o no/a.ffr", 1, "its folder does not exist"),
        ("pack rows.jsonl -o plain.ffr", 1, "plain.ffr already exists"),
        ("pack rows.jsonl -o photos --force", 1, "photos exists and is not a file"),
        ("pack rows.jsonl -o photos --files 2", 1, "photos already exists"),
        ("pack rows.jsonl -o a --files 2 --file-size 1M", 2, "exclude each other"),
        (
            "pack rows.jsonl -o a --file-size 1X",
            2,
            "--file-size: invalid size '1X': expected e.g. 64K",
        ),
        (
            "pack rows.jsonl -o a.ffr --from csv",
            1,
            "invalid --from 'csv': expected one of folder, tar",
        ),
        ("pack rows.jsonl -o a.ffr --columns z", 1, "no column 'z'"),
        ("pack rows.jsonl -o a.ffr --format v3", 2, "--format 'v3': expected one of auto, v1, v2"),
        ("pack rows.jsonl -o a.ffr --format v1", 1, "v1 files hold one column"),
        ("pack rows.jsonl -o a.ffr --compression gzip", 2, "'gzip': expected zstd"),
        ("pack no_module:x -o a.ffr", 1, "No module named 'no_module'"),
        ("ls rows.jsonl", 1, "does not end in '.ffr'"),
        ("ls photos", 1, "no '*.ffr' file in directory photos"),
        ("cat plain.ffr 5", 1, "has samples 0 to 4, not 5"),
        ("cat plain.ffr 0 --as csv", 2, "--as 'csv': expected one of"),
        ("cat plain.ffr 0 --column x", 1, "no column 'x'; its columns: data"),
        ("split plain.ffr -o s", 2, "give exactly one of --count"),
        ("split plain.ffr -o s --count 2 --files 2", 2, "give exactly one of --count"),
        ("split plain.ffr -o s --count 2 --shuffle 1", 2, "require --fractions"),
        ("split plain.ffr -o s --fractions 0.5,x", 2, "--fractions '0.5,x': expected numbers"),
        ("split plain.ffr -o s --fractions 0.5,0.2", 1, "sum to 1"),
        ("split plain.ffr -o s --fractions 0.5,0.5 --names a,../b", 1, "names of files"),
        ("split plain.ffr -o s --fractions 0.5,0.5 --names a,a", 1, "2 fractions need 2"),
        (
            "convert plain.ffr -o a.csv",
            2,
            "--to 'csv': expected one of ffr, tar, jsonl, parquet, npy",
        ),
        ("convert plain.ffr -o a.tar --format v2", 2, "require --to ffr, not tar"),
        ("merge plain.ffr missing.ffr -o a.ffr", 1, "missing.ffr"),
        ("merge plain.ffr -o a.ffr --compression gzip", 2, "'gzip': expected zstd"),
        ("pack rows.jsonl -o a.ffr --format v1 --compression zstd", 2, "cannot hold compressed"),
        ("split plain.ffr -o s --count 2 --names a", 2, "require --fractions"),
        ("split plain.ffr -o . --files 2 --force", 1, "the current folder"),
        ("pack photos -o photos --files 2 --force", 1, "photos contains"),
        (f"split plain.ffr -o s --file-size {'9' * 5000}", 2, "expected e.g. 64K"),
        ("verify missing", 1, "'missing' does not end in '.ffr'"),
        ("verify plain.ffr missing.ffr", 1, "cannot read 'missing.ffr': No such file"),
        ("cat empty.ffr 0", 1, "empty.ffr has no samples"),
    ],
)
def test_what_cannot_work_is_one_line_and_leaves_nothing(
    here: Path, capsysbinary: Any, line: str, code: int, message: str
) -> None:
    with FileWriter("empty.ffr", 0):
        pass
    before = sorted(os.listdir("."))
    assert run_line(["record", *line.split()]) == code
    out, err = (text.decode() for text in capsysbinary.readouterr())
    assert out == ""
    assert re.fullmatch(r"fireflyer: [^\n]*\n", err), err
    assert message in err
    assert sorted(os.listdir(".")) == before


def test_a_page_of_files_with_different_columns(here: Path, capsysbinary: Any) -> None:
    ran(capsysbinary, "pack photos -o photos.ffr")
    ran(capsysbinary, "pack rows.jsonl -o rows.ffr")
    files = "photos.ffr rows.ffr plain.ffr"
    table = ran(capsysbinary, f"ls {files}")
    assert ran(capsysbinary, f"ls {files} --html page.html") == table + "written: page.html\n"
    html = (here / "page.html").read_text()
    assert html.count('class="head"') == 6 + 10 + 5
    assert html.count("<img ") == 6
    assert "sample 4" in html
    assert "Files of several kinds" in html


def test_closed_output_is_as_dev_null(here: Path) -> None:
    line = [sys.executable, "-P", "-m", "fireflyer.cli", "record", "verify", "plain.ffr"]
    for closed in (">&-", "2>&-"):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", *line], stderr=subprocess.PIPE, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")


ENDLESS = """
import os, sys
def rows():
    number = 0
    while True:
        if number == 1000:
            sys.stderr.write("under way\\n")
            sys.stderr.flush()
        yield b"x" * 5000
        number += 1
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", ["-o a.ffr", "-o parts --file-size 1M"])
@pytest.mark.parametrize(
    ("number", "code", "last"),
    [(signal.SIGINT, 130, "fireflyer: interrupted"), (signal.SIGTERM, 143, "under way")],
)
def test_ctrl_c_and_sigterm_leave_no_partial_file(
    shell: Any, started: Any, options: str, number: int, code: int, last: str
) -> None:
    shell.script(ENDLESS, "endless.py")
    running = started(shell.start("record", "pack", "endless:rows", *options.split()))
    running.until("stderr", "under way")
    running.process.send_signal(number)
    _, err = running.end(code)
    assert err.splitlines()[-1] == last
    assert {p.name for p in shell.folder.iterdir()} <= {"endless.py", "__pycache__", "home"}
