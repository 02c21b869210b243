"""Saves from a real GPU. Skipped, and listed as such, where there is none.

Each in a fresh process: CUDA does not survive a fork.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoint.gpu.cases import CASES
from tests.hfreduce.devices.device_memory import has_gpu
from tests.waiting import LIMIT_S

DEADLINE_S = LIMIT_S


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    if not has_gpu():
        pytest.skip("no GPU here: torch.cuda.is_available() is false")


@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(tmp_path: Path, case: str) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.gpu.cases", case, str(tmp_path)]
    run = subprocess.run(command, timeout=DEADLINE_S, check=False, capture_output=True, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
