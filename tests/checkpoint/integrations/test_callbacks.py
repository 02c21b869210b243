"""Lightning and the Hugging Face Trainer, as installed in build/callbacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoint.conftest import Machine
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / "build" / "callbacks" / "bin" / "python"


@pytest.mark.full
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_resumed_runs_are_bit_equal(machine: Machine, tmp_path: Path, library: str) -> None:
    """With one keeper at most, which `machine` ends."""
    if not PYTHON.exists():
        pytest.skip(f"{library} is not installed: scripts/setup.sh --all-test-packages")
    script = Path(__file__).parent / "callbacks" / f"{library}_runs.py"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    run = subprocess.run(
        [PYTHON, script, tmp_path],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=440,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert run.stdout.endswith(f"{library}: ok\n")


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_without_its_package_a_face_says_what_to_install(library: str) -> None:
    """In a process that cannot import the package, wherever this one could."""
    script = f"""
import sys
sys.modules[{library!r}] = None
from fireflyer.errors import ConfigError
try:
    import fireflyer.checkpoint.integrations.{library}
except ConfigError as error:
    assert "pip install '{library}>=" in str(error), error
else:
    raise SystemExit("imported")
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=LIMIT_S).returncode == 0
