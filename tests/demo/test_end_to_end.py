"""The demo as a user runs it: it trains, loses a rank, goes on, and leaves nothing behind."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fireflyer.demo import gpt, processes
from fireflyer.demo.dataset import Settings, prepare, read_text
from fireflyer.demo.figures import Figures

DEMO = [sys.executable, "-P", "-m", "fireflyer.demo"]


@pytest.mark.full
def test_a_short_demo_reaches_its_goal(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--seconds", "20", "--json", "--keep"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    figures = json.loads(done.stdout)
    assert figures.keys() == set(Figures.__struct_fields__)
    assert figures["attempts"] == 3
    assert figures["loss_end"] < figures["loss_start"] - 1
    assert figures["kill_detected_s"] > 0
    assert figures["restart_s"] > figures["kill_detected_s"]
    assert figures["steps_lost"] >= 0
    assert figures["suspend_s"] > 0
    assert figures["checkpoint_stall_ms"] > 0
    assert figures["orphans"] == 0
    page = (tmp_path / "demo-report.html").read_text(encoding="utf-8")
    assert page.count('class="mark back"') == 2
    (run,) = (tmp_path / "fireflyer-demo").glob("run-*")
    assert processes.marked(str(run)) == []
    lines = [json.loads(line) for line in next(run.rglob("metrics.jsonl")).read_text().splitlines()]
    for earlier, later in itertools.pairwise(lines):
        if later["attempt"] == earlier["attempt"]:
            assert later["step"] == earlier["step"] + 1
        else:
            assert later["step"] <= earlier["step"] + 1
            assert later["step"] == later["checkpoint_step"] + 1
    resumed = next(i for i, line in enumerate(lines) if line["attempt"] == 3)
    assert lines[resumed]["step"] == lines[resumed - 1]["step"] + 1, "a suspend loses no step"


@pytest.mark.full
@pytest.mark.parametrize("said", ["platform started", "loss"])
def test_ctrl_c_ends_everything(tmp_path: Path, said: str) -> None:
    """Interrupted when the platform has just started, and in the middle of the training."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.py").write_text("".join(f"def f_{i}(x): return x * {i}\n" for i in range(4000)))
    with subprocess.Popen(
        [*DEMO, "--text", str(texts), "--tokens", "bytes", "--width", "32", "--layers", "1"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stderr is not None
        seen = next(line for line in demo.stderr if said in line)
        (run,) = (tmp_path / "fireflyer-demo").glob("run-*")
        running = processes.marked(str(run))
        # The server; and, when there are steps, two supervisors and two ranks at least.
        assert len(running) >= (1 if said == "platform started" else 5), (seen, running)
        os.killpg(demo.pid, signal.SIGINT)
        rest = demo.stderr.read()
    assert demo.returncode == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest
    assert processes.outliving(running, 0) == []
    assert processes.marked(str(run)) == []
    assert not run.exists()


def test_the_script_runs_without_the_platform(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.py").write_text("".join(f"def f_{i}(x): return x * {i}\n" for i in range(400)))
    settings = Settings(tokens="bytes", context=16)
    data = prepare(read_text(texts), tmp_path / "data", settings, lambda *_: None)
    (tmp_path / "work").mkdir()
    model = ["--steps", "4", "--batch", "2", "--width", "32", "--layers", "1", "--heads", "1"]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    subprocess.run(
        [sys.executable, gpt.__file__, "--data", str(data), *model],
        cwd=tmp_path / "work",
        env=clean,
        check=True,
    )
    (metrics,) = (tmp_path / "work").rglob("metrics.jsonl")
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2, 3, 4]
    (sample,) = (tmp_path / "work").rglob("sample.txt")
    assert sample.read_text().startswith("def")
