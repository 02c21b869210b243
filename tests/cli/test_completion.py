"""Completions that the scripts of shells ask for."""

import subprocess
import sys
from pathlib import Path

import pytest

from fireflyer.cli.app import run_line
from fireflyer.cli.completion import COMPLETE


def completions(words: str, home: str) -> list[str]:
    """Returns the answers to a Tab behind these words, the last of which is the incomplete one."""
    environment = {
        COMPLETE: "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "FIREFLYER_HOME": home,
    }
    return subprocess.run(
        [sys.executable, "-P", "-m", "fireflyer.cli"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fireflyer su", ["suspend"]),
        ("fireflyer fs mo", ["mount"]),
        ("fireflyer run --wat", ["--watchdog"]),
        ("fireflyer stop t", []),  # no server, no task, no error
    ],
)
def test_verbs_and_options_are_completed(words: str, expected: list[str], tmp_path: Path) -> None:
    assert completions(words, str(tmp_path)) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_name_the_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{COMPLETE}=complete_{shell}" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
