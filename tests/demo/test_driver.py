"""What the driver hands to the platform, and that it ends what is left of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fireflyer.demo import driver, gpt, processes
from fireflyer.demo.driver import Options


def test_the_script_takes_what_the_driver_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(nodes=3, ranks=2, seconds=20, width=64, layers=3, batch=5)
    spec = driver._spec(options, tmp_path / "data", tmp_path)
    assert Path(spec.script) == Path(gpt.__file__)
    assert (spec.nodes, spec.ranks_per_node, spec.cwd) == (3, 2, str(tmp_path))
    monkeypatch.setattr(sys, "argv", [spec.script, *spec.args])
    given = gpt.options()
    assert (given.data, given.seconds) == (tmp_path / "data", 20)
    assert (given.width, given.layers, given.heads, given.batch) == (64, 3, 2, 5)


@pytest.mark.parametrize(("seconds", "every"), [(5, "1.0s"), (45, "3.0s"), (130, "5.0s")])
def test_checkpoints_are_seconds_apart(tmp_path: Path, seconds: float, every: str) -> None:
    spec = driver._spec(Options(seconds=seconds), tmp_path, tmp_path)
    assert spec.args[spec.args.index("--save-every") + 1] == every


def test_whatever_is_left_of_a_run_is_ended_with_what_it_started_meanwhile(tmp_path: Path) -> None:
    ignoring = (
        "import signal, subprocess, sys\n"
        "for n in (signal.SIGTERM, signal.SIGINT): signal.signal(n, signal.SIG_IGN)\n"
        "if len(sys.argv) < 4:\n"
        "    subprocess.Popen([sys.executable, '-c', sys.argv[1], *sys.argv[1:], 'x'])\n"
        "print(flush=True)\n"
        "signal.pause()"
    )
    environment = {**os.environ, processes.MARK: str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", ignoring, ignoring], env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        driver._end(tmp_path)
        assert processes.marked(str(tmp_path)) == []
        assert process.stdout.read() is not None  # every writer of the pipe is gone


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_bytes(b"\n".join(b"line %d \xff" % i for i in range(5000)))
    assert driver.tail(str(log), 2) == "line 4998 �\nline 4999 �"
    assert driver.tail(str(tmp_path / "none")) == ""


def test_a_result_that_is_not_there_or_torn_is_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert driver._val_loss(path) is None
    path.write_text('{"val_loss": 2.')
    assert driver._val_loss(path) is None
    path.write_text('{"val_loss": 2.25}')
    assert driver._val_loss(path) == 2.25
