"""What an installation without torch says."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "wanted",
    [
        "import fireflyer.haiscale.ddp",
        "import fireflyer.haiscale.fsdp",
        "from fireflyer.checkpoint import CheckpointManager",
        "from fireflyer.hfreduce import empty",
    ],
)
def test_without_torch_the_extra_is_named(wanted: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; {wanted}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: fireflyer.")
    assert last.endswith(" needs torch: pip install 'fireflyer[torch]'")
