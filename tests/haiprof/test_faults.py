"""Injected faults are named first, in runs of four ranks on four hosts of a lab."""

import os
import subprocess
import sys

import pytest
from tests.haiprof.faults import BLKIO, EXPECTED


@pytest.mark.full
@pytest.mark.parametrize("kind", EXPECTED)
def test_the_injected_fault_is_named_first(kind: str) -> None:
    if os.geteuid() or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("namespaces and a slow processor need root and two processors")
    if kind == "disk" and not BLKIO.is_dir():
        pytest.skip("a slow disk needs the blkio controller")
    command = [sys.executable, "-m", "tests.haiprof.faults", kind, "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
