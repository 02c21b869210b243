"""Triton's kernels, interpreted on CPUs, with Triton as installed in build/callbacks."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "callbacks" / "bin" / "python"


@pytest.mark.full
@pytest.mark.deadline(300)
def test_kernels_of_gpus_compute_what_torch_does() -> None:
    if not PYTHON.exists():
        pytest.skip("triton is not installed: scripts/setup.sh --all-test-packages")
    run = subprocess.run(
        [PYTHON, "-m", "tests.nn.triton_runs"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout == "triton: ok\n"
