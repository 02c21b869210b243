"""A short storm. `make soak-hai` runs the long ones."""

from pathlib import Path

import pytest
from tests.hai.soak.soak import Pace, Summary, soak
from tests.hai.soak.target import KILLED

BLOWS = 10


def must_be_whole(summary: Summary) -> None:
    """Nothing lost, done twice or left behind, and the storm was one."""
    assert not summary.problems, (summary.problems[:10], summary.history)
    assert summary.verdict.finished >= sum(summary.tasks.values()) > 0
    assert sum(summary.blows.values()) == BLOWS
    assert len(summary.kills.keys() & set(KILLED)) >= 4
    assert summary.kills["server"] > 0


@pytest.mark.full
def test_kills(tmp_path: Path) -> None:
    must_be_whole(soak(0.0, 4, tmp_path, Pace(every_s=0.7, blows=BLOWS)))
