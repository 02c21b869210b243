"""Injected faults are named first, in runs of four ranks on four hosts of a lab.

The faults here show on a busy machine, too. The others, which compare speeds, need a quiet one:
`python -m tests.haiprof.faults cpu disk network loader --seeds 10`.
"""

import os
import subprocess
import sys

import pytest


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lock", "leak", "healthy"])
def test_the_injected_fault_is_named_first(kind: str) -> None:
    if os.geteuid() or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("namespaces and a slow processor need root and two processors")
    command = [sys.executable, "-m", "tests.haiprof.faults", kind, "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
