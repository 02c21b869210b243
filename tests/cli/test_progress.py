"""Progress without a terminal."""

import pytest

from fireflyer.cli.progress import BYTES, EVERY_S, Lines, progress
from fireflyer.clock import ManualClock


def test_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    lines = Lines("copying", 4000, BYTES, clock.monotonic)
    lines.add(1000)
    clock.advance(EVERY_S)
    lines.add(1000)
    lines.add(500)  # none is due
    clock.advance(EVERY_S)
    lines.add(1500)
    assert capsys.readouterr().err.splitlines() == [
        "copying: 2,000 of 4,000 bytes (50%)",
        "copying: 4,000 of 4,000 bytes (100%)",
    ]


def test_work_of_unknown_size(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    lines = Lines("packing", None, "samples", clock.monotonic)
    clock.advance(EVERY_S)
    lines.add(12)
    assert capsys.readouterr().err == "packing: 12 samples\n"


def test_short_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("copying", 10) as advance:
        advance(10)
    assert capsys.readouterr().err == ""
