"""`fireflyer fs` as a command: what it prints, its exit codes, and what copies leave behind."""

import base64
import errno
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fireflyer.cli.app import run_line
from fireflyer.errors import Corrupted, StorageError
from fireflyer.fs3 import survey
from fireflyer.fs3.client import Client, File
from fireflyer.fs3.client.discovery import VARIABLE, announce, attach
from fireflyer.fs3.config import embed
from fireflyer.fs3.process import ALL, Process

VERBS = [
    "up", "ls", "cat", "put", "get", "cp", "mv", "rm", "mkdir", "stat", "du", "find", "status", "check",
]  # fmt: skip
HEAVY = ["torch", "numpy", "rich", "msgspec", "asyncio", "fireflyer.fs3"]


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
    """An empty file system that the command finds, and an empty current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, str(served))
    with attach() as client:
        for name in client.listdir("/"):
            assert run_line(["fs", "rm", "-r", f"/{name}"]) == 0
        yield client


def ran(capsys: Any, line: str, code: int = 0) -> str:
    """What the command printed; nothing on stderr if it went well."""
    assert run_line(["fs", *line.split()]) == code, capsys.readouterr()
    out, err = capsys.readouterr()
    assert (err == "") == (code == 0 or bool(out)), err
    return str(out or err)


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    script = f"""
import contextlib, io, sys
from fireflyer.cli.app import run_line
for verb in {VERBS!r}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run_line(["fs", verb, "--help"]) == 0
    assert f"fireflyer fs {{verb}} " in out.getvalue().partition("Options:")[0]
assert not [name for name in {HEAVY!r} if name in sys.modules], sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-P", "-c", script], check=True)


def test_alone_it_shows_its_verbs(capsys: Any) -> None:
    out = ran(capsys, "", 2)
    assert out.startswith("Usage: fireflyer fs ")
    assert all(f"  {verb} " in out for verb in VERBS)


def test_a_tree_goes_in_and_out(fs: Client, capsys: Any) -> None:
    rng = random.Random(3)
    made = {f"in/{name}": rng.randbytes(size) for name, size in (("a", 0), ("b/c", 9 << 20))}
    for name, data in made.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(data)
    Path("in/run").write_text("#!/bin/sh\n")
    Path("in/run").chmod(0o755)
    Path("in/link").symlink_to("b/c")
    assert ran(capsys, "put -r in /") == ""
    assert ran(capsys, "mkdir /other") == ""
    assert ran(capsys, "cp -r in /other") == ""
    assert ran(capsys, "get -r /other/in out") == ""
    assert sorted(os.listdir("out")) == ["a", "b", "link", "run"]
    assert os.readlink("out/link") == "b/c"
    assert Path("out/link").read_bytes() == made["in/b/c"]
    assert os.stat("out/run").st_mode & 0o777 == 0o755
    ran(capsys, "put in/a in/run /in/b")
    ran(capsys, "get /in/link one")
    assert not Path("one").is_symlink()
    assert Path("one").read_bytes() == made["in/b/c"]
    assert fs.listdir("/in/b") == ["a", "c", "run"]
    text = ran(capsys, "cat /in/run /in/run")
    assert text == "#!/bin/sh\n" * 2


def test_a_copy_that_fails_leaves_what_was_there(
    fs: Client, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a").write_bytes(b"x" * (9 << 20))
    with fs.open("/a", "wb") as file:
        file.write(b"before")

    def broken(self: File, data: memoryview, offset: int) -> int:
        if offset:
            raise StorageError("no more")
        return len(data)

    with monkeypatch.context() as patched:
        patched.setattr(File, "pwrite", broken)
        assert ran(capsys, "put a /a", 1) == "fireflyer: no more\n"
    assert ran(capsys, "cat a") == "before"
    assert fs.listdir("/") == ["a"]

    def short(self: File, memory: memoryview, offset: int) -> int:
        return 0

    Path("b").write_text("before")
    with monkeypatch.context() as patched:
        patched.setattr(File, "pread_into", short)
        assert "became shorter" in ran(capsys, "get /a b", 1)
    assert Path("b").read_text() == "before"
    assert sorted(os.listdir()) == ["a", "b"]


@pytest.mark.parametrize(
    "line",
    [
        ["cp", "/f", "/f"],
        ["mv", "/f", "/d/../f"],
        ["cp", "-r", "/d", "/d/inner"],
        ["cp", "-r", "/d", "/"],
        ["mv", "/d", "/d/in"],
    ],
)
def test_nothing_goes_onto_or_into_itself(fs: Client, capsys: Any, line: list[str]) -> None:
    fs.makedirs("/d/in")
    with fs.open("/f", "wb") as file:
        file.write(b"x")
    assert run_line(["fs", *line]) == 1
    assert re.search("are the same|cannot go into itself", capsys.readouterr().err)
    assert [found.path for found in survey.tree(fs, "/")] == ["/", "/d", "/d/in", "/f"]


def test_names(fs: Client, capsys: Any) -> None:
    assert "No such file" in ran(capsys, "mkdir /a/b", 1)
    ran(capsys, "mkdir -p /a/b /c")
    ran(capsys, "mkdir -p /a/b")
    ran(capsys, "mv /c a/b")
    Path("x").write_bytes(bytes(3000))
    ran(capsys, "put x /a/b/c/")
    ran(capsys, "mv /a/b/c/x /a/b/c/y")
    assert ran(capsys, "ls") == "a/\n"
    assert ran(capsys, "find") == "/\n/a\n/a/b\n/a/b/c\n/a/b/c/y\n"
    assert ran(capsys, "find --type f --name ?") == "/a/b/c/y\n"
    assert ran(capsys, "ls a/b/c -l").splitlines()[1].split()[3:5] == ["2.93", "KiB"]
    [row] = json.loads(ran(capsys, "ls a/b/c --json"))
    assert (row["path"], row["bytes"], row["type"]) == ("a/b/c/y", 3000, "file")
    assert json.loads(ran(capsys, "du --json")) == [
        {"path": "/a", "bytes": 3000, "files": 1, "directories": 3}
    ]
    [row] = json.loads(ran(capsys, "stat --json /a/b/c/y"))
    assert row["layout"]["chunk_size"] == 1 << 20
    assert "type      file\n" in ran(capsys, "stat /a/b/c/y")
    assert ran(capsys, "rm a", 1) == "fireflyer: /a is a directory: remove it with --recursive\n"
    ran(capsys, "rm -r a")
    ran(capsys, "rm -f a")
    assert ran(capsys, "rm a", 1) == "fireflyer: /a: No such file or directory\n"
    assert fs.listdir("/") == []


def test_names_that_are_no_text_steer_no_terminal(fs: Client, capsys: Any) -> None:
    fs.mkdir(b"/\xff\x1b[31m")
    assert ran(capsys, "ls") == "\\xff\\x1b[31m/\n"
    [row] = json.loads(ran(capsys, "ls --json"))
    assert row["path"] == "/\\xff\x1b[31m"
    assert "\x1b" not in ran(capsys, "ls -l") + ran(capsys, "du") + ran(capsys, "find")


def test_status_and_check(fs: Client, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ran(capsys, "status")
    assert text.startswith("no problems: 1 inode; 4 chains, 4 whole (table version 1)\n")
    found = json.loads(ran(capsys, "status --json"))
    assert [node["name"] for node in found["nodes"]] == ["s1"]
    assert {chain["state"] for chain in found["chains"]} == {"whole"}
    with fs.open("/a", "wb") as file:
        file.write(bytes(5 << 20))
    assert ran(capsys, "check").endswith("1 file, 5 MiB read: all whole\n")

    def damaged(self: File, memory: bytearray, offset: int) -> int:
        raise Corrupted("chunk 3 is damaged")

    monkeypatch.setattr(File, "pread_into", damaged)
    text = ran(capsys, "check", 1)
    assert text.startswith("/a: chunk 3 is damaged\n")
    assert text.endswith("1 file, 0 B read: 1 damaged\n")
    assert json.loads(ran(capsys, "check --json", 1))["damages"] == [
        {"path": "/a", "reason": "chunk 3 is damaged"}
    ]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("ls /absent", 1, "/absent: No such file or directory"),
        ("cat /", 1, "Is a directory"),
        ("put absent /", 1, "absent: No such file or directory"),
        ("put folder /x", 1, "folder is a directory: copy it with --recursive"),
        ("put folder/f /x/", 1, "/x/ is not a directory"),
        ("put folder/f", 2, "Missing argument 'SOURCE...'"),
        ("get /absent .", 1, "/absent: No such file or directory"),
        ("mv /a /b /c", 1, "/c is not a directory"),
        ("rm -r /", 1, "the root cannot be moved or removed"),
        ("rm -r /../.", 1, "the root cannot be moved or removed"),
        ("find --type x", 2, "--type 'x': expected one of f, d, l, p, s, c, b"),
        ("ls --dir absent/x", 1, "absent/x does not exist"),
        ("ls --dir folder", 1, "there is no file system in folder"),
        ("ls --dir nowhere", 1, "`fireflyer fs up --dir nowhere` makes a file system there"),
        ("ls --dir host:port", 1, "invalid address 'host:port'"),
        ("up", 2, "give exactly one of --dir and --config"),
        ("up --dir x --config y", 2, "give exactly one of --dir and --config"),
        ("up --dir x --role meta", 2, "--role, --name and --standby require --config"),
        ("up --config x --targets 2", 2, "--replicas and --targets require --dir"),
        ("up --config x --role king", 2, "--role 'king': expected one of manager, meta, storage"),
        ("up --config x", 1, "x cannot be read"),
        ("up --dir x --targets 0", 2, "Invalid value for '--targets'"),
    ],
)
def test_errors_are_one_line(fs: Client, capsys: Any, line: str, code: int, message: str) -> None:
    Path("folder").mkdir()
    Path("folder/f").write_text("")
    text = ran(capsys, line, code)
    assert message in text
    assert text.count("\n") == 1
    assert fs.listdir("/") == []
    assert os.listdir() == ["folder"]


def test_without_a_place(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert "set FIREFLYER_FS" in ran(capsys, "ls", 1)


ODD = b"odd-\xff\xe9\x1b[31m-\xc3\xa9"
ODD_SHOWN = r"odd-\xff\xe9\x1b[31m-" + "é"
ODD_IN_JSON = r"odd-\xff\xe9" + "\x1b[31m-é"


def test_names_that_are_no_text_are_shown_alike_everywhere(fs: Client, capsys: Any) -> None:
    """And are taken as arguments as the shell gives them."""
    name = os.fsdecode(ODD)
    fs.mkdir(b"/d")
    fs.open(b"/d/" + ODD, "wb").close()
    fs.symlink(ODD, b"/d/link")
    assert ran(capsys, "ls /d") == f"link\n{ODD_SHOWN}\n"
    assert ran(capsys, "ls -l /d").splitlines()[2].endswith(f"  {ODD_SHOWN}")
    assert ran(capsys, "find /d --type f") == f"/d/{ODD_SHOWN}\n"
    exact = base64.b64encode(b"/d/" + ODD).decode()
    for line in ("find /d --type f --json", f"stat --json /d/{name}", f"du --json /d/{name}"):
        [row] = json.loads(ran(capsys, line))
        assert (row["path"], row["path_base64"]) == (f"/d/{ODD_IN_JSON}", exact), line
    assert "path_base64" not in json.loads(ran(capsys, "find / --type d --json"))[0]
    assert json.loads(ran(capsys, "stat --json /d/link"))[0]["target"] == ODD_IN_JSON
    assert ran(capsys, f"stat /d/{name}").splitlines()[0] == f"path      /d/{ODD_SHOWN}"
    assert ran(capsys, f"du /d/{name}").splitlines()[1].endswith(f"/d/{ODD_SHOWN}")
    assert ran(capsys, f"mv /d/{name} /d/plain") == ""
    said = ran(capsys, f"cat /d/{name}", 1)
    assert said == f"fireflyer: /d/{ODD_SHOWN}: No such file or directory\n"


def test_a_damaged_file_with_an_odd_name_is_reported(
    fs: Client, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fs.open(b"/" + ODD, "wb") as file:
        file.write(b"abc")

    def damaged(self: File, buffer: Any, offset: int) -> int:
        raise Corrupted(f"reading {self.name}: it is damaged")

    monkeypatch.setattr(File, "pread_into", damaged)
    said = ran(capsys, "check", 1)
    assert said.splitlines()[0] == f"/{ODD_SHOWN}: reading /{ODD_SHOWN}: it is damaged"
    [found] = json.loads(ran(capsys, "check --json", 1))["damages"]
    assert found["path"] == f"/{ODD_IN_JSON}"
    assert found["reason"] == f"reading /{ODD_IN_JSON}: it is damaged"


def test_errors_of_copies_name_what_was_asked_for(
    fs: Client, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the file that is written beside it."""
    Path("f").write_bytes(b"abc")
    fs.open("/f", "xb").close()
    for line, path in (
        ("put f /none/f", "/none/f"),
        ("cp /f /none/f", "/none/f"),
        ("get /f no/f", "no/f"),
    ):
        said = ran(capsys, line, 1)
        assert said == f"fireflyer: {path}: No such file or directory\n"

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with fs.open("/f", "wb") as file:
        file.write(b"abc")
    monkeypatch.setattr(os, "pwrite", full)
    assert ran(capsys, "get /f g", 1) == "fireflyer: g: No space left on device\n"
    assert os.listdir() == ["f"]
    monkeypatch.setattr(os, "preadv", full)
    assert ran(capsys, "put f /g", 1) == "fireflyer: f: No space left on device\n"
    assert fs.listdir("/") == ["f"]
