"""The strategy for Lightning, with Lightning as installed in build/callbacks."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fireflyer.errors import ConfigError

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "callbacks" / "bin" / "python"


@pytest.mark.full
def test_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("lightning is not installed: scripts/setup.sh --all-test-packages")
    run = subprocess.run(
        [PYTHON, Path(__file__).parent / "lightning_runs.py", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=440,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert run.stdout.endswith("strategy: ok\n")


def test_without_lightning_the_strategy_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "fireflyer.haiscale.lightning", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'lightning>="):
        importlib.import_module("fireflyer.haiscale.lightning")
