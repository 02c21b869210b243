"""The scripts in examples/ run as their first lines say, from the fork server with torch."""

from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_an_ordinary_ddp_script_runs_on_two_ranks(shell: Any) -> None:
    done = shell.run("run", "--ranks", "2", str(EXAMPLES / "torch_ddp.py"))
    lines = done.stdout.splitlines()
    assert len(lines) == 5, done.stdout + done.stderr
    first, last = (float(line.rsplit(" ", 1)[1]) for line in (lines[0], lines[-1]))
    assert all("2 ranks" in line for line in lines)
    assert last < first
