"""Checks that hang, crash, write garbage, fill the disk or need root; limits; plug-ins."""

import os
import tempfile
from pathlib import Path

import msgspec
import psutil
import pytest
from tests import waiting
from tests.validator import misbehaving

from fireflyer.errors import ValidatorError
from fireflyer.validator import limits, model, runner
from fireflyer.validator.model import Result, Settings, all_checks, chosen

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of checks import this folder, too."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def ran(function: str, folder: Path, timeout_s: float = waiting.LIMIT_S) -> dict[str, Result]:
    check = misbehaving.check(function)
    settings = Settings(directory=str(folder))
    found = list(runner.run([check], settings, timeout_s=timeout_s))
    assert [result.name for result in found] == ["speed", "time"]
    assert list(folder.iterdir()) == [], "scratch folders are removed"
    return {result.name: result for result in found}


@pytest.mark.parametrize("function", ["good", "chatter"])
def test_a_good_check(tmp_path: Path, function: str) -> None:
    found = ran(function, tmp_path)
    assert found["speed"] == Result(
        name="speed", status="passed", value=100.0, unit="MB/s", reason="", samples=(99.0, 101.0)
    )
    assert (found["time"].status, found["time"].better) == ("passed", "less")


@pytest.mark.parametrize(
    ("function", "speed", "reason"),
    [
        ("crash", "passed", "the check was killed by SIGSEGV"),
        ("leave", "not run", "the check ended with exit code 3"),
        ("forget", "passed", "ended without this figure"),
        ("garbage", "not run", "the check wrote garbage"),
        ("flood", "not run", "the check wrote garbage: more than"),
        ("stranger", "not run", "the check wrote an unknown figure"),
        ("large_file", "not run", "File too large"),
        ("needs_root", "not run", "needs root: "),
        ("lacks", "not run", "the node has no such card [31m"),
        ("broken", "not run", "ValueError: no such thing"),
        ("missing", "not run", "has no attribute 'missing'"),
    ],
)
def test_what_does_not_work_is_not_run(
    tmp_path: Path, function: str, speed: str, reason: str
) -> None:
    found = ran(function, tmp_path)
    assert found["speed"].status == speed
    assert found["time"].status == "not run"
    assert reason in found["time"].reason
    assert len(found["time"].reason.splitlines()) == 1


def test_a_check_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, folder = tmp_path / "child", tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("CHILD", str(note))
    check = misbehaving.check("hang")
    stop = False

    def began() -> bool:
        """Ends the wait once the child has written its number."""
        nonlocal stop
        stop = stop or (note.exists() and note.read_text() != "")
        return stop

    found = list(runner.run([check], Settings(directory=str(folder)), stop=began))
    assert [result.status for result in found] == ["passed", "not run"]
    assert found[1].reason == "the validation was stopped during the check"
    child = int(note.read_text())
    waiting.until(
        lambda: not psutil.pid_exists(child) or _is_dead(child), lambda: "the child lives"
    )


def _is_dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_hang_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD", os.devnull)
    found = ran("hang", tmp_path, timeout_s=0.2)
    assert "the check hung: no end after 0.2 s" in found["time"].reason


def test_the_end_of_the_budget_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD", os.devnull)
    settings = Settings(directory=str(tmp_path))
    found = list(runner.run([misbehaving.check("hang")], settings, budget_s=0.4))
    assert found[1].reason == "the validation's 0.4 s ended during the check"


def test_a_check_that_fills_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SCRATCH_BYTES", 4 << 20)
    found = ran("fill", tmp_path)
    assert found["speed"].status == "not run"
    assert "the check filled the disk: more than 4 MiB" in found["speed"].reason


def test_failed_hardware(tmp_path: Path) -> None:
    found = ran("bad_hardware", tmp_path)
    assert (found["speed"].status, found["speed"].reason) == ("failed", "two lanes of sixteen")
    assert (found["time"].status, found["time"].reason) == ("not run", "no clock")


def test_a_broken_disk_stops_only_the_checks_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder can be written: neither that of the checks nor that of temporary files."""
    monkeypatch.setattr(runner, "MEMORY", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    good = misbehaving.check("good")
    of_disk = msgspec.structs.replace(good, name="of disk", disk=True)
    for directory in ("", "/proc/none"):
        found = list(runner.run([good, of_disk], Settings(directory=directory)))
        assert [one.status for one in found] == ["passed", "passed", "not run", "not run"]
        assert "cannot write to /proc/none" in found[2].reason
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_floods_stderr(tmp_path: Path) -> None:
    found = ran("scream", tmp_path)
    assert found["speed"].status == "passed"
    assert found["time"].reason == "the check wrote garbage: more than 16 MiB to stderr"


def test_a_budget_that_is_used_up(tmp_path: Path) -> None:
    settings = Settings(directory=str(tmp_path))
    found = list(runner.run([misbehaving.check("good")], settings, budget_s=0.01))
    assert found[0].reason == "the validation's 0.01 s are used up"


# -- limits and plug-ins ---------------------------------------------------------------------------


def test_fixed_thresholds(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("[speed]\nmin = 200\n[time]\nmax = 1.5\n")
    bounds = limits.read(path, {"speed", "time"})
    settings = Settings(directory=str(tmp_path))
    found = list(runner.run([misbehaving.check("good")], settings, bounds))
    assert [(one.status, one.reason) for one in found] == [
        ("failed", "100 MB/s is below the limit 200"),
        ("failed", "2 s is above the limit 1.5"),
    ]
    path.write_text("[speed]\nmin = 10\n")
    found = list(runner.run([misbehaving.check("good")], settings, limits.read(path, {"speed"})))
    assert {one.status for one in found} == {"passed"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[height]\nmin = 1\n", "unknown figure 'height'"),
        ("[speed]\nleast = 1\n", "unknown field `least`"),
        ("[speed]\nmin = 'a'\n", "Expected `float"),
        ("[speed", "Expected"),
        ("speed = 3\n", "Expected `object`"),
        ("[speed]\n", "has neither min nor max"),
        ("[speed]\nmin = nan\n", "min not above max"),
        ("[speed]\nmin = 3\nmax = 2\n", "min not above max"),
    ],
)
def test_bad_limits(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(ValidatorError, match=message):
        limits.read(path, {"speed"})


def test_all_checks_can_be_loaded_and_have_unique_figures() -> None:
    checks = all_checks()
    figures = [figure.name for check in checks for figure in check.figures]
    assert len(set(figures)) == len(figures) >= 20
    for check in checks:
        if not check.function.startswith(("fireflyer.validator.gpu", "fireflyer.validator.all")):
            assert callable(model.function_of(check))
    assert sum(check.duration_s for check in checks) <= runner.QUICK_S, "a quick one takes a minute"


def test_plug_ins_come_after_the_built_in_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "BUILT_IN", (f"{__name__}:PLUGIN",))
    assert [check.name for check in all_checks()] == ["good"]
    monkeypatch.setattr(model, "BUILT_IN", (f"{__name__}:PLUGIN",) * 2)
    with pytest.raises(ValidatorError, match="two checks are named 'good'"):
        all_checks()
    monkeypatch.setattr(model, "BUILT_IN", ("no.such.module:CHECKS",))
    with pytest.raises(ValidatorError, match=r"cannot load the checks 'no\.such\.module:CHECKS'"):
        all_checks()
    with pytest.raises(ValidatorError, match="invalid check 'gem'"):
        chosen(PLUGIN, ["gem"])


PLUGIN = (misbehaving.check("good"),)
