"""Phases of the Trainers of Lightning and transformers, as installed in build/callbacks."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "callbacks" / "bin" / "python"


@pytest.mark.full
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_every_part_of_a_step_of_a_trainer_is_accounted_for(name: str) -> None:
    if not PYTHON.exists():
        pytest.skip("the packages are not installed: scripts/setup.sh --all-test-packages")
    run = subprocess.run(
        [PYTHON, "-m", "tests.haiprof.trainer_runs", name],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert run.stdout.endswith(f"{name}: ok\n")
