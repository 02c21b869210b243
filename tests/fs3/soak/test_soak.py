"""Short soaks. `make soak-fs3` runs the long ones, and looks at how long operations stalled."""

from pathlib import Path

import pytest
from tests.fs3.soak.load import KINDS
from tests.fs3.soak.soak import Pace, Summary, soak

from fireflyer.lab import namespaces

MISSING = namespaces.why_not()
needs_lab = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def must_be_whole(summary: Summary) -> None:
    """Nothing lost, wrong or stuck, and all that was to be done was done."""
    assert not summary.problems, summary.problems[:10]
    assert set(KINDS) <= set(summary.operations)
    assert summary.verdict.files > 0
    assert summary.verdict.replicas > summary.verdict.files
    assert summary.written > 0
    assert summary.read > 0


@pytest.mark.full
@pytest.mark.netns
@needs_lab
def test_kills(tmp_path: Path) -> None:
    summary = soak("kills", 12.0, 3, tmp_path, Pace(clients=2, threads=1))
    must_be_whole(summary)
    assert sum(summary.faults.values()) == 6
    assert summary.faults["storage"] > 0
    assert not summary.errors
    assert summary.verdict.doubtful == 0


@pytest.mark.full
@pytest.mark.netns
@needs_lab
def test_anything(tmp_path: Path) -> None:
    pace = Pace(clients=2, threads=1, fault_s=1.0, scrub_s=1.0)
    summary = soak("anything", 12.0, 1, tmp_path, pace)
    must_be_whole(summary)
    assert {"kill", "kill all", "cut", "freeze", "fill"} <= set(summary.faults)
    allowed = {"NoSpace", "Corrupted"} if summary.faults["beyond the budget"] else {"NoSpace"}
    assert {error.split()[1] for error in summary.errors} <= allowed
