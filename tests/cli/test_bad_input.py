"""What cannot work: exactly one line on stderr, nothing on stdout, exit code 1 or 2, nothing half-made."""

import os
import re
import socket
from pathlib import Path

import pytest

from fireflyer.cli.app import run_line


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FIREFLYER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text("")
    (tmp_path / "folder").mkdir()
    return tmp_path / "home"


def refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert run_line(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"fireflyer: [^\n]*\n", err), err
    assert message in err or re.search(message, err), err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fly", "No such command 'fly'"),
        ("--fly", "No such option: --fly"),
        ("ps --fly", "No such option: --fly"),
        ("ps extra", "unexpected extra argument"),
        ("run", "Missing argument 'SCRIPT'"),
        ("run --fly good.py", "No such option: --fly"),
        ("run --nodes two good.py", "Invalid value for '--nodes'"),
        ("run --nodes 0 good.py", "Invalid value for '--nodes'"),
        ("run --nodes", "requires an argument"),
        ("run good.py -- --fly", "No such option: --fly"),
        (
            "run good.py -- -n 2 x",
            "unexpected 'x' after the last `--`: expected only options of run",
        ),
        ("run good.py -- -n x", "Invalid value for '--nodes'"),
        ("show", "Missing argument 'TASK'"),
        ("logs t1 --rank -1", "Invalid value for '--rank'"),
        ("up --port 70000", "Invalid value for '--port'"),
        ("up --nodes 0", "Invalid value for '--nodes'"),
        ("up --nodes 1_000", "expected a number in digits, instead of '1_000'"),
        ("up --nodes 99999999999999999999999", "less than or equal to 10000"),
        ("run --grace 1_0 good.py", "expected a number in digits, instead of '1_0'"),
        ("sim --generate philly:3 --seed 1_0", "expected a number in digits"),
        ("sim --generate philly:3 --estimates inf", "less than or equal to 1000000"),
        ("stop", "Missing argument 'TASK'"),
    ],
)
def test_usage(home: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    refused(capsys, line.split(), 2, message)
    assert not home.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run missing.py", r"script \S*/missing.py does not exist"),
        ("run folder", "folder is a directory"),
        ("run --start spoon good.py", "invalid --start 'spoon': expected one of auto, fork, exec"),
        ("run -e NOT_SET_HERE good.py", "NOT_SET_HERE is not set in this environment"),
        ("run -e RANK=1 good.py", "RANK is set by the platform"),
        ("run -e =1 good.py", "'' has no usable name"),
        ("run --priority no-such good.py", "invalid --priority 'no-such'"),
        ("run --memory \u0663 good.py", "invalid --memory '\u0663'"),
        ("run --prof time=1_0 good.py", "invalid --prof time=1_0"),
        ("run --grace 1e9 good.py", "--grace) must be from 0 to 86400"),
        ("run --ranks 4096 good.py", "--ranks) must be from 1 to 1024"),
        ("run good.py \udcff\udcfe", "argument 1 of the script is not valid UTF-8"),
        ("run \udcff.py", "the script's path is not valid UTF-8"),
        ("run --name \udcff good.py", "name (--name) is not valid UTF-8"),
        ("run --name \x1b[31m good.py", "name (--name) has control characters"),
        ("run -e A=\udcff good.py", "environment variable 'A' (--env) is not valid UTF-8"),
        ("ps --home \udcff", "is not valid UTF-8; set FIREFLYER_HOME or --home"),
        ("show ../../etc", "no task '../../etc' here"),
        ("logs \udcff", "no task '\\\\udcff' here"),
        ("events x1", "no task 'x1' here"),
        ("ps", "no server serves"),
        ("show t1", "no server serves"),
        ("logs t1", "no server serves"),
        ("events", "no server serves"),
        ("stop t1", "no server serves"),
        ("nodes", "no server serves"),
        ("down", "no server serves"),
    ],
)
def test_failure(home: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    refused(capsys, line.split(), 1, message)
    assert not home.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("experts ls none", "there is no folder of experts at none: "),
        ("experts check none", "there is no folder of experts at none: "),
        ("experts pack none", "there is no folder of experts at none: "),
        ("experts add none poet missing.pt", "missing.pt does not exist"),
        ("experts add none poet missing.safetensors", "missing.safetensors"),
        ("experts add none ../poet good.py", "invalid name of an expert"),
        ("kv stat none", "there is no store at none: "),
        ("kv gc none", "there is no store at none: "),
        ("kv compact none", "there is no store at none: "),
        ("kv gc folder", r"there is no store at \S*/folder: "),
        ("kv compact folder", r"there is no store at \S*/folder: "),
    ],
)
def test_a_store_that_is_not_there_is_not_made(
    home: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    refused(capsys, line.split(), 1, message)
    assert sorted(os.listdir(home.parent)) == ["folder", "good.py"]
    assert os.listdir(home.parent / "folder") == []


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_a_user_without_home(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    home: str | None,
) -> None:
    """Only an absolute $HOME counts; an unknown user id, as in containers, has none by the system."""
    monkeypatch.delenv("FIREFLYER_HOME", raising=False)
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
    else:
        monkeypatch.setenv("HOME", home)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    refused(capsys, ["ps"], 1, "has no home directory: set HOME or FIREFLYER_HOME, or use --home")


def test_a_port_in_use(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(capsys, ["up", "--port", str(port)], 1, f"cannot listen on port {port}")


@pytest.mark.parametrize("verb", ["up", "run good.py"])
def test_a_home_that_cannot_be(home: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    home.write_text("")
    refused(capsys, verb.split(), 1, r"cannot use \S*/home as home")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_is_not_writable(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.parent.chmod(0o500)
    try:
        refused(capsys, ["run", "good.py"], 1, "Permission denied")
    finally:
        home.parent.chmod(0o700)


@pytest.mark.parametrize("verb", ["up", "run good.py"])
def test_a_database_that_is_not_ours(
    home: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    home.mkdir()
    (home / "hai.sqlite").write_bytes(b"a letter to my aunt" * 1000)
    refused(capsys, verb.split(), 1, "hai.sqlite is damaged or not a database")


def test_a_stale_or_damaged_server_json_without_a_server(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.mkdir()
    (home / "server.json").write_text("{")
    refused(capsys, ["ps"], 1, "no server serves")
