"""`fireflyer run --workspace`, `--venv-lock` and `fireflyer workspace` on the real server."""

import base64
import csv
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fireflyer.hai.http.auth import owner

READ = """
import os, sys
from pathlib import Path
import helper
print(helper.TEXT, Path("data.txt").read_text(), os.path.exists("secret.env"), flush=True)
if sys.argv[1:]:
    with open(sys.argv[1]) as fifo:
        fifo.read()
    os._exit(3 if os.environ["FIREFLYER_ATTEMPT"] == "1" else 0)
"""

Started = Callable[[Any], Any]


def folder(shell: Any) -> Path:
    source: Path = shell.folder / "source"
    source.mkdir()
    (source / ".gitignore").write_text("*.env\n")
    (source / "secret.env").write_text("x")
    (source / "data.txt").write_text("data")
    (source / "helper.py").write_text("TEXT = 'first'\n")
    (source / "read.py").write_text(READ)
    return source


def test_editing_the_folder_changes_nothing_for_any_attempt(shell: Any, started: Started) -> None:
    source = folder(shell)
    fifo = shell.folder / "fifo"
    os.mkfifo(fifo)
    command = shell.start(
        "run", "--start", "exec", "--workspace", "source", "source/read.py", str(fifo)
    )
    run = started(command)
    run.until("stdout", "first data False\n")
    (source / "helper.py").write_text("TEXT = 'second'\n")
    (source / "data.txt").unlink()
    fifo.write_bytes(b"")
    run.until("stderr", "restarting")
    fifo.write_bytes(b"")
    out, err = run.end(0)
    assert out == "first data False\n" * 2
    assert "4 files" in err
    shown = json.loads(shell.run("show", "t1", "--json").stdout)
    assert (shown["spec"]["script"], shown["spec"]["cwd"]) == ("read.py", ".")


def test_list_show_pull_prune(shell: Any) -> None:
    source = folder(shell)
    (source / "read.py").chmod(0o755)
    line = ("run", "--start", "exec", "--workspace", str(source), str(source / "read.py"))
    first = shell.run(*line)
    assert "sent 4 files" in first.stderr
    assert "sent 0 files, 0 B" in shell.run(*line).stderr
    (found,) = json.loads(shell.run("workspace", "list", "--json").stdout)
    assert (found["files"], found["user"]) == (4, owner())
    listed = shell.run("workspace", "list").stdout
    assert listed.startswith(found["id"][:12])
    assert listed.endswith("tasks: t1 t2\n")
    shown = shell.run("workspace", "show", found["id"][:8]).stdout.splitlines()
    assert [text.split()[2] for text in shown] == [".gitignore", "data.txt", "helper.py", "read.py"]
    assert shown[3].startswith("-rwxr-xr-x")
    shell.run("workspace", "pull", "t1", "copy")
    names = sorted(path.name for path in (shell.folder / "copy").iterdir())
    assert names == [".gitignore", "data.txt", "helper.py", "read.py"]
    assert (shell.folder / "copy/read.py").stat().st_mode & 0o777 == 0o755
    error = shell.run("workspace", "pull", "t1", "copy", code=1).stderr
    assert error == "fireflyer: copy exists and is not an empty folder\n"
    assert json.loads(shell.run("workspace", "prune", "--json").stdout)["workspaces"] == 0
    gone = json.loads(shell.run("workspace", "prune", "--older-than", "0", "--json").stdout)
    assert (gone["workspaces"], gone["blobs"]) == (1, 4)
    assert "no workspace" in shell.run("workspace", "pull", "t1", "again", code=1).stderr
    assert "sent 4 files" in shell.run(*line).stderr


def test_what_cannot_be_shipped_starts_no_server(shell: Any) -> None:
    source = folder(shell)
    (shell.folder / "outside.py").write_text("")
    (source / "big.bin").write_bytes(bytes(2 << 20))
    for options, message in (
        (("--workspace", "nowhere", "outside.py"), "is not a directory"),
        (("--workspace", "source", "outside.py"), "outside.py is not in the workspace"),
        (("--workspace", "source", "source/secret.env"), "is it ignored by a .gitignore file?"),
        (
            ("--workspace", "source", "--workspace-limit", "1", "source/read.py"),
            "more than 1.0 MiB; the largest: big.bin (2.0 MiB)",
        ),
    ):
        assert message in shell.run("run", *options, code=1).stderr
    assert not shell.home.exists()


def wheel(folder: Path, text: str) -> str:
    """A wheel of one module `tinydep`; its SHA-256."""
    files = {
        "tinydep.py": f"TEXT = {text!r}\n",
        "tinydep-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinydep\nVersion: 1.0\n",
        "tinydep-1.0.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=")
        rows.writerow([name, f"sha256={digest.decode()}", len(content)])
    rows.writerow(["tinydep-1.0.dist-info/RECORD", "", ""])
    files["tinydep-1.0.dist-info/RECORD"] = record.getvalue()
    path = folder / "tinydep-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


USE = """
import sys, tinydep
import fireflyer.hai
print(tinydep.TEXT, sys.prefix != sys.base_prefix, flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("start", ["exec", "fork"])
def test_an_environment_by_lock_file(shell: Any, start: str) -> None:
    digest = wheel(shell.folder, "locked")
    shell.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shell.folder)}
    (shell.folder / "lock.txt").write_text(
        f"# made by hand\ntinydep==1.0 \\\n    --hash=sha256:{digest}\n"
    )
    script = shell.script(USE)
    line = ("run", "--start", start, "--venv-lock", "lock.txt", script)
    first = shell.run(*line)
    assert "fireflyer: making the environment of" in first.stdout
    assert "fireflyer: the environment is ready\n" in first.stdout
    assert first.stdout.endswith("locked True\n")
    assert shell.run(*line).stdout == "locked True\n"
    (shell.folder / "bad.txt").write_text("tinydep==1.0 --hash=sha256:" + "0" * 64)
    done = shell.run("run", "--max-restarts", "0", "--venv-lock", "bad.txt", script, code=1)
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stdout
    assert "could not be made; the messages of pip are in the output of rank 0" in done.stderr
    ready = sorted(path.suffix for path in (shell.home / "venvs").iterdir())
    assert ready.count(".ready") == 1


def test_a_lock_file_that_is_not_there_starts_no_server(shell: Any) -> None:
    done = shell.run("run", "--venv-lock", "none.txt", shell.script(USE), code=1)
    assert "cannot read the lock file none.txt" in done.stderr
    assert not (shell.home / "server.lock").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tinydep==1.0", "has no hash"),
        ("tinydep --hash=sha256:" + "0" * 64, "expected `name==version`"),
        ("--index-url https://user:pw@x/", "has the option '--index-url'"),
        ("-e .", "has the option '-e'"),
        ("-r other.txt", "has the option '-r'"),
        ("tinydep @ https://x/y.whl --hash=sha256:" + "0" * 64, "expected `name==version`"),
        ("./tinydep.whl --hash=sha256:" + "0" * 64, "expected `name==version`"),
        ("tinydep==1.0 --hash=sha256:00", "has no hash"),
        (
            "tinydep==1.0 --config-settings=x --hash=sha256:" + "0" * 64,
            "or an option other than a hash",
        ),
    ],
)
def test_lock_files_that_say_too_little(text: str, message: str) -> None:
    from fireflyer.errors import WorkspaceError
    from fireflyer.hai.workspaces.venvs import check_lock

    with pytest.raises(WorkspaceError, match=message):
        check_lock(text.encode())
