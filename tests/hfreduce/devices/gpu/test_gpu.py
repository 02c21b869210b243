"""Collectives on a real GPU; several ranks share it. Skipped, and listed as such, where there is none.

Ranks are fresh processes: CUDA does not survive a fork.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hfreduce.devices.device_memory import has_gpu
from tests.hfreduce.devices.gpu.ranks import CASES
from tests.waiting import LIMIT_S

DEADLINE_S = LIMIT_S


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    if not has_gpu():
        pytest.skip("no GPU here: torch.cuda.is_available() is false")


@pytest.mark.parametrize("shape", ["A", "AA", "AB", "AABB"])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(tmp_path: Path, case: str, shape: str) -> None:
    if case == "a_late_input_names_its_rank" and len(shape) == 1:
        shape = "AAA"
    command = [sys.executable, "-m", "tests.hfreduce.devices.gpu.ranks", case, shape]
    ranks = []
    for rank in range(len(shape)):
        output = open(tmp_path / f"rank-{rank}.log", "wb")  # noqa: SIM115  # the process has it
        environment = os.environ | {"RANK": str(rank), "STORE": str(tmp_path / "store")}
        ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        output.close()
    try:
        codes = [process.wait(DEADLINE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    logs = "\n".join((tmp_path / f"rank-{r}.log").read_text()[-2000:] for r in range(len(shape)))
    assert codes == [0] * len(shape), logs
