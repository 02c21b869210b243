"""The C++ tests pass under the sanitizers."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.xdist_group("sanitizers")
@pytest.mark.deadline(3600)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_native_tests_pass_under(sanitizer: str) -> None:
    done = subprocess.run(
        ["scripts/native-test.sh", sanitizer], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    sources = [*ROOT.glob("native/**/*_test.cpp"), *ROOT.glob("native/**/*_fuzz.cpp")]
    if sanitizer == "thread":
        sources = [s for s in sources if "base/testing/one_thread.hpp" not in s.read_text()]
    assert f"all {len(sources)} tests passed" in done.stdout
