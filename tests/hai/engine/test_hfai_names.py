"""HAI's own names do what ours do; its whole-life state outlives attempts."""

from pathlib import Path

import pytest

from fireflyer import hai
from fireflyer.errors import Corrupted


def test_the_names_are_the_same_functions() -> None:
    assert hai.receive_suspend_command is hai.suspend_requested
    assert hai.go_suspend is hai.suspended


def test_the_state_is_kept_with_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_TASK_DIR", str(tmp_path))
    assert hai.get_whole_life_state() == 0
    hai.set_whole_life_state(-7)
    assert hai.get_whole_life_state() == -7
    assert (tmp_path / "whole_life_state").read_bytes() == b"-7\n"
    assert [path.name for path in tmp_path.iterdir()] == ["whole_life_state"]
    (tmp_path / "whole_life_state").write_text("seven")
    with pytest.raises(Corrupted, match="does not hold a number"):
        hai.get_whole_life_state()


def test_outside_a_task_it_is_the_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREFLYER_TASK_DIR", raising=False)
    hai.set_whole_life_state(3)
    assert hai.get_whole_life_state() == 3
    hai.set_whole_life_state(0)


def test_only_whole_numbers() -> None:
    with pytest.raises(TypeError, match="not str"):
        hai.set_whole_life_state("3")  # type: ignore[arg-type]
