"""What a person sees, and the command's answers to bad input."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console
from tests.demo.conftest import META

from fireflyer.demo import command as command_line
from fireflyer.demo.driver import Outcome
from fireflyer.demo.figures import compute
from fireflyer.demo.progress import TerminalScreen, plain, spark, summary, view


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, color_system=None), out


def test_without_a_terminal_there_is_a_line_every_ten_seconds_of_training(script: Any) -> None:
    shown, out = console(terminal=False)
    with TerminalScreen(shown) as screen:
        script.start()
        for _ in range(25):
            script.train()
            screen.show(script.story)
    lines = out.getvalue().splitlines()
    assert [line.split()[3] for line in lines] == ["1", "21"]
    assert "tokens/s" in lines[0]
    assert "attempt 1" in lines[0]


def test_events_are_told_once(finished: Any) -> None:
    shown, out = console(terminal=False)
    with TerminalScreen(shown) as screen:
        screen.show(finished.story)
        screen.show(finished.story)
    text = out.getvalue()
    assert text.count("platform: rank 1 was ended by SIGKILL") == 1
    assert text.count("platform: restarting, rank 1 on n1 was killed by SIGKILL") == 1
    assert text.count("platform: suspended") == 1
    assert text.count("platform: finished") == 1


def test_the_live_view_shows_loss_speed_communication_checkpoint_and_attempt(script: Any) -> None:
    script.start()
    for step in range(10):
        script.train(save=step == 5)
    shown, out = console(terminal=True)
    shown.print(view(script.story))
    text = out.getvalue()
    for part in (
        "loss  5.450",
        "tokens/s  200",
        "10.0% of a step",
        "step 6",
        "attempt  1",
        "running",
    ):
        assert part in text
    assert "5 of 20 s, step 10" in text


def test_the_view_of_a_task_that_has_not_stepped(script: Any) -> None:
    shown, out = console(terminal=True)
    shown.print(view(script.story))
    assert "queued" in out.getvalue()


def test_the_live_view_is_gone_afterwards_and_building_shows_its_stage(script: Any) -> None:
    shown, out = console(terminal=True)
    script.start()
    script.train()
    with TerminalScreen(shown) as screen:
        screen.building("packing records", 5, 10)
        screen.note("platform started")
        screen.show(script.story)
    assert "packing records" in out.getvalue()
    assert "platform started" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")


def test_plain_line(script: Any) -> None:
    script.start()
    script.train(save=True)
    script.train()
    expected = (
        "   1.0 s  step 2  loss 5.850  200 tokens/s  communication 10%  checkpoint step 1"
        "  attempt 1  running"
    )
    assert plain(script.story) == expected


def test_spark_falls_with_its_values() -> None:
    assert spark([]) == ""
    assert spark([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert spark([3.0] * 5) == "▁▁▁▁▁"
    assert len(spark([float(i) for i in range(1000)], width=48)) <= 48


def test_the_summary_holds_the_values(finished: Any) -> None:
    figures = compute(finished.story, orphans=0)
    assert figures is not None
    shown, out = console(terminal=True)
    shown.print(summary(figures))
    for part in ("920 ms", "20 ms", "300 ms", "4.0 ms", "not seen"):
        assert part in out.getvalue()


def command(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "fireflyer.demo", *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--seconds", "1"], 2, "--seconds"),
        (["--width", "100"], 2, "100 is not a multiple of 32"),
        (["--tokens", "words"], 2, "--tokens"),
        (["--frobnicate"], 2, "--frobnicate"),
        (["--text", "nowhere"], 2, "is not a folder"),
        (["--text", "empty"], 2, "it holds no file"),
        (["--report", "nowhere/r.html"], 2, "the folder of nowhere/r.html does not exist"),
        (["--report", "empty"], 2, "--report: empty is a folder; name a file"),
        (["--report", "/proc/r.html"], 2, "--report: cannot write into the folder of /proc/r.html"),
        (["--dir", "file/x"], 2, "--dir"),
        (["--dir", "/proc"], 2, "--dir: cannot write into /proc"),
    ],
)
def test_bad_input_is_one_clear_answer_and_starts_nothing(
    tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.rglob("run-*"))


@pytest.fixture
def outcome(finished: Any, tmp_path: Path) -> Outcome:
    """What a run came to that never happened."""
    return Outcome(
        figures=compute(finished.story, orphans=0),
        problems=[],
        story=finished.story,
        meta=META,
        sample="def written(): pass",
        log="",
        folder=tmp_path,
    )


def test_a_page_that_cannot_be_written_costs_neither_figures_nor_sample(
    outcome: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "page.html"

    def run(*_: object) -> Outcome:
        page.mkdir()
        return outcome

    monkeypatch.setattr(command_line, "run", run)
    assert command_line.run_line(["--report", str(page), "--json"]) == 1
    out, err = capsys.readouterr()
    assert '"steps"' in out
    assert err.index("What this run measured") < err.index("def written(): pass")
    assert err.splitlines()[-1].startswith(f"fireflyer: cannot write the report {page}")
    assert "report: " not in err


def test_a_failed_run_says_why_then_shows_the_end_of_the_log_unwrapped(
    outcome: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / "1.log"
    lines = [f"line {number} " + "x" * 300 for number in range(9)]
    log.write_text("\n".join(lines))
    reason = "the task ended as failed: " + "why " * 60
    failed = structs.replace(outcome, figures=None, problems=[reason.strip()], log=str(log))
    monkeypatch.setattr(command_line, "run", lambda *_: failed)
    assert command_line.run_line(["--report", str(tmp_path / "page.html")]) == 1
    shown = [f"not reached: {reason.strip()}", *lines[-3:], f"log: {log}"]
    assert capsys.readouterr().err.splitlines() == shown


def test_an_interrupt_while_modules_are_imported_is_one_line(tmp_path: Path) -> None:
    """The first heavy import sends the signal, inside a callback where an exception would get lost."""
    (tmp_path / "msgspec.py").write_text(
        "import signal, weakref\n"
        "class Dying: ...\n"
        "dying = Dying()\n"
        "watch = weakref.ref(dying, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "del dying\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fireflyer.demo"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130
    assert done.stderr == "fireflyer: interrupted; every process of the demo has ended\n"
