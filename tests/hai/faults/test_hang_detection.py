"""Hangs and stragglers, on a clock that the test turns; heartbeats and what they cost."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from fireflyer import hai, heartbeat
from fireflyer.hai.faults.hang_detection import HangDetector, StragglerDetector, behind
from fireflyer.heartbeat import Heartbeat


def test_quiet_is_told_once_and_again_after_a_sign_of_life() -> None:
    quiet = HangDetector(0.0)
    assert quiet.feed("a", 0.0, 60.0) is None
    assert quiet.feed("a", 59.9, 60.0) is None
    assert quiet.feed("b", 60.0, 60.0) is None
    assert quiet.feed("b", 119.9, 60.0) is None
    assert quiet.feed("b", 120.0, 60.0) == 60.0
    assert quiet.feed("b", 500.0, 60.0) is None
    assert quiet.feed("c", 501.0, 60.0) is None
    assert quiet.feed("c", 561.0, 60.0) == 60.0


def at(step: int) -> Heartbeat:
    return Heartbeat(1.0, 2.0, 0.0, step, -1, ())


@pytest.mark.parametrize(
    ("steps", "rank"),
    [
        ({0: 5, 1: 4, 2: 5}, 1),
        ({0: 5, 1: 5}, None),
        ({0: 5, 1: 4, 2: 4}, None),
        ({0: 5, 2: 4}, None),  # of rank 1 nothing is known
        ({0: -1, 1: 3, 2: 3}, 0),
        ({}, None),
    ],
)
def test_the_one_that_is_behind_all_others(steps: dict[int, int], rank: int | None) -> None:
    world = 2 if steps == {0: 5, 1: 5} else 3
    assert behind({r: at(step) for r, step in steps.items()}, world) == rank


def test_a_gang_of_one_has_nobody_behind() -> None:
    assert behind({0: at(3)}, 1) is None


def times(slow: dict[int, float], steps: range, ranks: int = 4) -> dict[int, dict[int, float]]:
    return {rank: dict.fromkeys(steps, slow.get(rank, 1.0)) for rank in range(ranks)}


def test_slow_for_long_enough_is_a_straggler_and_told_once() -> None:
    pace = StragglerDetector(factor=1.5, in_a_row=4)
    assert pace.feed(times({2: 2.0}, range(3))) == []
    assert pace.feed(times({2: 2.0}, range(4))) == [(2, 2.0)]
    assert pace.feed(times({2: 2.0}, range(10))) == []
    assert pace.now == {2: 2.0}


def test_one_good_step_begins_anew() -> None:
    pace = StragglerDetector(factor=1.5, in_a_row=4)
    assert pace.feed(times({2: 2.0}, range(3))) == []
    assert pace.feed(times({}, range(3, 4))) == []
    assert pace.feed(times({2: 2.0}, range(4, 7))) == []
    assert pace.now == {}
    assert pace.feed(times({2: 2.0}, range(7, 8))) == [(2, 2.0)]


def test_a_step_is_judged_once_and_only_when_all_have_told_it() -> None:
    pace = StragglerDetector(factor=1.5, in_a_row=2)
    late = times({1: 3.0}, range(2))
    del late[3][1]
    assert pace.feed(late) == []
    assert pace.feed(late) == []
    assert pace.feed(times({1: 3.0}, range(2))) == [(1, 3.0)]


def test_two_ranks_do_not_know_which_is_slow_and_noise_is_not_judged() -> None:
    assert StragglerDetector(in_a_row=1).feed(times({0: 9.0}, range(5), ranks=2)) == []
    fast = {rank: {1: 1e-5 * (1 + 9 * (rank == 0))} for rank in range(4)}
    assert StragglerDetector(in_a_row=1).feed(fast) == []


def test_equal_ranks_with_noise_have_no_straggler_and_the_slow_one_is_found() -> None:
    draw = random.Random(7)
    for slow in (None, 5):
        pace, found = StragglerDetector(), []
        for step in range(200):
            took = {rank: {step: draw.uniform(0.9, 1.1)} for rank in range(8)}
            if slow is not None:
                took[slow][step] *= 1.8
            found += [rank for rank, _ in pace.feed(took)]
        assert found == ([] if slow is None else [slow])


# -- heartbeats ----------------------------------------------------------------------------------------


def test_what_a_rank_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "0.pulse"
    monkeypatch.setenv("FIREFLYER_PULSE", str(path))
    assert heartbeat.read(path) is None
    hai.heartbeat()
    told = heartbeat.read(path)
    assert told is not None
    assert (told.step, told.saved, told.steps) == (-1, 0.0, ())
    for step in range(1, 100):
        hai.heartbeat(step, busy_s=step / 8)
    hai.saved(50)
    told = heartbeat.read(path)
    assert told is not None
    assert (told.step, told.saved_step, told.saved > 0) == (99, 50, True)
    assert told.steps == tuple((step, step / 8) for step in range(36, 100))
    assert told.first <= told.last


def test_the_same_step_again_is_a_heartbeat_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "0.pulse"
    monkeypatch.setenv("FIREFLYER_PULSE", str(path))
    for step in (1, 1, 2, 2, 2):
        hai.heartbeat(step)
    told = heartbeat.read(path)
    assert told is not None
    assert [step for step, _ in told.steps] == [2]


def test_a_record_that_was_read_while_it_was_written_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "0.pulse"
    monkeypatch.setenv("FIREFLYER_PULSE", str(path))
    hai.heartbeat(1)
    data = path.read_bytes()
    assert len(data) == heartbeat.SIZE
    assert heartbeat.decode(data) is not None
    for at_byte in (0, 4, 7, heartbeat.SIZE - 1):  # magic, first and second number
        torn = bytearray(data)
        torn[at_byte] ^= 1
        assert heartbeat.decode(bytes(torn)) is None
    assert heartbeat.decode(data[:-1]) is None
    assert heartbeat.decode(b"") is None


def test_the_pulse_outlives_a_rank_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "0.pulse"
    script = (
        "import os, signal; from fireflyer import hai; hai.heartbeat(7); os.kill(os.getpid(), 9)"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "FIREFLYER_PULSE": str(path)},
        check=False,
    )
    told = heartbeat.read(path)
    assert told is not None
    assert told.step == 7


def test_outside_a_task_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREFLYER_PULSE", raising=False)
    monkeypatch.chdir(tmp_path)
    hai.heartbeat(3)
    hai.saved(3)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_takes_nothing_does_not_end_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIREFLYER_PULSE", str(tmp_path / "missing" / "0.pulse"))
    hai.heartbeat(1)
    assert not (tmp_path / "missing").exists()
