"""Rows of a script that notes itself how long its phases took."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.haiprof.scripts import is_prepared
from tests.haiprof.truth import SLEEPS
from tests.waiting import LIMIT_S, until

from fireflyer.haiprof.attach.collect import Options, collect
from fireflyer.haiprof.phases import Row

STEPS = 12


@pytest.mark.full
def test_phases_agree_with_a_script_that_measures_itself(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    command = [sys.executable, "-m", "tests.haiprof.truth", str(notes)]
    with subprocess.Popen(command) as script:
        try:
            until(lambda: is_prepared(script.pid))
            asked = Options(
                seconds=LIMIT_S, recorders="phase", most_steps=STEPS, from_first_step=True
            )
            (found,) = collect([script.pid], asked)
            rows = found.profile.steps
            until(lambda: len(compared(rows, notes)) == len(rows))
        finally:
            script.kill()
    pairs = compared(rows, notes)
    for phase in (*SLEEPS, "communication"):
        ours = sum(row.phases[phase] for row, _ in pairs)
        truth = sum(noted[phase] for _, noted in pairs)
        assert ours == pytest.approx(truth, rel=0.01), phase


def compared(rows: list[Row], notes: Path) -> list[tuple[Row, dict[str, float]]]:
    """Returns rows with the notes of the same step: the first ones after the row's end."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    found = []
    for row in rows:
        end = row.begin_ns / 1e9 + row.seconds
        following = next((noted for at, noted in lines if at >= end), None)
        if following is not None:
            found.append((row, following))
    return found
