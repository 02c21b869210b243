"""Ways to call the platform's verbs: several tasks, modules, no directory, no Python program."""

import os
import subprocess
from pathlib import Path

import pytest
from tests.cli.conftest import COMMAND, Shell

from fireflyer.cli.app import run_line
from fireflyer.cli.cluster import impl
from fireflyer.hai.model import TaskState, WhyView


def test_several_tasks_are_stopped_and_a_refusal_keeps_none(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = shell.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("WORD = 'relative'\n")
    (package / "main.py").write_text(
        "import os, signal, sys\nfrom .other import WORD\n"
        "print(__name__, sys.argv[1:], WORD, sys.path[0] == os.getcwd(), flush=True)\n"
        "signal.pause() if sys.argv[1:] == ['hold'] else None\n"
    )
    monkeypatch.setenv("FIREFLYER_HOME", str(shell.home))
    monkeypatch.chdir(shell.folder)
    done = shell.run("run", "-m", "package.main", "--lr", "1")
    assert done.stdout == "__main__ ['--lr', '1'] relative True\n"
    for number in (2, 3):
        shell.run("run", "-d", "-m", "package.main", "hold")
        assert shell.client.task(f"t{number}").spec.name == "package.main"
    capsys.readouterr()
    assert run_line(["stop", "--wait", "t2", "t1", "t3"]) == 1
    out, err = capsys.readouterr()
    assert [line.replace(":", "").split()[:2] for line in out.splitlines()] == [
        ["t2", "stopped"],
        ["t3", "stopped"],
    ]
    assert err.startswith("fireflyer: ")
    assert "t1" in err


def test_more_memory_than_there_is_is_refused(shell: Shell) -> None:
    script = shell.script("")
    done = shell.run("run", "-d", "--memory", "999TiB", script, code=1)
    assert "the task asks for 1 node with 1022976GiB of memory each; this server" in done.stderr
    assert "ask for less. Its nodes have at most " in done.stderr
    assert shell.run("run", "--memory", "64MiB", script).returncode == 0


@pytest.mark.parametrize(
    ("state", "text", "shown"),
    [
        ("running", "running", "t1 is running\n"),
        ("suspended", "suspended", "t1 is suspended; `fireflyer resume t1` queues it\n"),
        ("failed", "rank 0 left", "t1 is failed: rank 0 left\n"),
    ],
)
def test_why_of_a_task_that_does_not_wait(
    state: TaskState, text: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    impl.why(WhyView(task="t1", state=state, text=text, policy="timeshare"), json=False)
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("line", ["run x.py", "ckpt ls /tmp", "bench list"])
def test_a_deleted_directory_is_named(tmp_path: Path, line: str) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["/bin/sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *COMMAND, *line.split()],
        cwd=gone, capture_output=True, text=True, check=False,
        env={**os.environ, "FIREFLYER_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        "fireflyer: the current directory was deleted: change to one that exists\n"
    )


@pytest.mark.parametrize("program", ["sh", "/bin/sh"])
def test_a_program_that_is_no_python_gets_a_hint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIREFLYER_HOME", str(tmp_path / "home"))
    assert run_line(["run", program, "-c", "true"]) == 1
    assert "start other programs from a Python script" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_help_of_run_says_which_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["run", "--help"]) == 0
    text = "Python of the `fireflyer` that started the server"
    assert text in " ".join(capsys.readouterr().out.split())
