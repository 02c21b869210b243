"""What the driver hands to the platform, and that it ends what is left of a run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fireflyer.demo import driver, gpt, processes
from fireflyer.demo.driver import Options
from fireflyer.demo.story import Story
from fireflyer.errors import PeerLost
from fireflyer.hai.model import RankView, TaskSpec, TaskView


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
        assert processes.end(str(tmp_path)) >= 2
        assert processes.marked(str(tmp_path)) == []
        assert process.stdout.read() is not None  # every writer of the pipe is gone


class Quiet:
    """A screen that nobody watches."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def building(self, stage: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def show(self, story: Story) -> None: ...


def test_a_server_that_went_away_is_told_as_the_demo_saw_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object) -> None:
        raise PeerLost("stopped responding; its tasks continue; start it again with `fireflyer up`")

    monkeypatch.setattr(driver, "_train", train)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("a few words\n" * 2000)
    options = Options(text=texts, tokens="bytes", directory=tmp_path / "dir")
    with pytest.raises(PeerLost) as caught:
        driver.run(options, Quiet(), processes.Interrupts())
    assert "the demo ended its task" in str(caught.value)
    assert "continue" not in str(caught.value)
    (kept,) = (tmp_path / "dir").glob("run-*")
    assert str(kept / "home") in str(caught.value)


def test_the_log_of_the_rank_that_failed_first_is_the_one_to_read(script: Any) -> None:
    ranks = tuple(
        RankView(rank=rank, node=f"n{rank}", pid=1, ended="x", log=f"{rank}.log")
        for rank in range(3)
    )
    view = TaskView(
        id="t1",
        spec=TaskSpec(script="x.py", cwd="/"),
        state="failed",
        reason="",
        attempt=2,
        generation=0,
        members=(),
        restarts=1,
        ranks=ranks,
        directory="",
        created=0.0,
    )
    script.start(world=3)
    script.exit(2, signal=9)
    script.start(world=3)
    assert driver.failing_log(script.story, view) == "0.log"
    script.exit(0)
    script.exit(1, signal=11)
    script.exit(2, signal=9)
    assert driver.failing_log(script.story, view) == "1.log"
    assert driver.failing_log(script.story, structs.replace(view, ranks=())) == ""


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
