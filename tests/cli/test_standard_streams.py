"""Standard streams that are closed, full, unread, or of an encoding without most characters."""

import io
import json
import os
import subprocess
import sys

import pytest
from tests.cli.conftest import COMMAND, Shell

from fireflyer.cli import printing
from fireflyer.cli.ledger import impl as ledger
from fireflyer.hai.ledger import Account
from fireflyer.hai.model import TaskLine, TaskSpec, TaskView
from fireflyer.program import in_one_line


def sh(shell: Shell, redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `fireflyer` by a shell with these redirections."""
    command = ["/bin/sh", "-c", f'exec "$@" {redirections}', "sh", *COMMAND, *arguments]
    return subprocess.run(
        command, cwd=shell.folder, env=shell.env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_programs_run_with_standard_descriptors_closed_full_or_unread(shell: Shell) -> None:
    script = shell.script("import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr)\n")
    assert sh(shell, "<&- >&- 2>&-", "run", "-d", script).returncode == 0
    assert shell.client.wait("t1", {"finished"}).attempt == 1
    assert shell.client.read_log("t1", 0)[0] == b"out\nerr\n"
    assert "token_file" not in shell.client.home.log.read_text()  # the line for the client
    for closed in ("<&-", ">&-", "2>&-"):
        done = sh(shell, closed, "run", script)
        assert done.returncode == 0
        assert "Traceback" not in done.stderr
    done = sh(shell, ">/dev/full", "ps", "-a")
    assert (done.returncode, done.stderr) == (1, "fireflyer: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    unread = subprocess.run(
        [*COMMAND, "ps", "-a"], env=shell.env, stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (unread.returncode, unread.stderr) == (1, b"")


class Terminal:
    """Standard output and error of an encoding."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
        self.bytes = {name: io.BytesIO() for name in ("stdout", "stderr")}
        for name, its in self.bytes.items():
            monkeypatch.setattr(sys, name, io.TextIOWrapper(its, encoding=encoding))


ENCODINGS = pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])


def view() -> TaskView:
    return TaskView(
        id="t1", spec=TaskSpec(script="/x/学.py", cwd="/x", name="学习 é"), state="failed",
        reason="学习 é", attempt=1, generation=0, members=(), restarts=0, ranks=(),
        directory="/x/学", created=0.0,
    )  # fmt: skip


def show(*, json: bool) -> int:
    if not json:
        line = TaskLine(id="t1", name="学习 é", state="failed", reason="学习 é", created=0.0)
        printing.tasks([line])
    printing.task(view(), json=json)
    return 0


@ENCODINGS
def test_tables_escape_what_the_encoding_lacks(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    terminal = Terminal(monkeypatch, encoding)
    assert in_one_line(lambda: show(json=False)) == 0
    shown = "学习 é".encode(encoding, "backslashreplace")
    assert terminal.bytes["stdout"].getvalue().count(shown) == 4
    assert terminal.bytes["stderr"].getvalue() == b""


@ENCODINGS
def test_json_is_utf_8_whatever_the_encoding(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    terminal = Terminal(monkeypatch, encoding)
    assert in_one_line(lambda: show(json=True)) == 0
    (line,) = terminal.bytes["stdout"].getvalue().decode().splitlines()
    found = json.loads(line)
    assert found["spec"]["name"] == found["reason"] == "学习 é"


@ENCODINGS
def test_errors_escape_what_the_encoding_lacks(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    terminal = Terminal(monkeypatch, encoding)

    def fail() -> int:
        raise FileNotFoundError(2, "missing", "/x/学\udcff")

    assert in_one_line(fail) == 1
    shown = r"fireflyer: /x/学\xff: missing".encode(encoding, "backslashreplace")
    assert terminal.bytes["stderr"].getvalue() == shown + b"\n"


@ENCODINGS
def test_bars_are_as_wide_in_every_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    terminal = Terminal(monkeypatch, encoding)
    one = Account(whole=2 * 10**9, held=10**9, parts={"useful": 10**9, "queue": 10**9})
    assert in_one_line(lambda: len(ledger.bar(one, 10)) - 10) == 0
    ledger._one("t1", one, "node-hours")
    sys.stdout.flush()
    assert b"\\u" not in terminal.bytes["stdout"].getvalue()
