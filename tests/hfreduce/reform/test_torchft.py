"""torchft's Manager, as installed in build/callbacks, over hfreduce."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / "build" / "callbacks" / "bin" / "python"


@pytest.mark.full
def test_a_killed_replica_is_replaced_by_one_that_heals(tmp_path: Path) -> None:
    """Its lighthouse forms quorums; the survivor goes on; the newcomer gets its weights."""
    if not PYTHON.exists():
        pytest.skip("torchft is not installed: scripts/setup.sh --all-test-packages")
    run = subprocess.run(
        [PYTHON, Path(__file__).parent / "torchft_runs.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=440,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert run.stdout.endswith("torchft: ok\n")
