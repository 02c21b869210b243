"""The benchmark of the profiler, short: its rows."""

import pytest

from fireflyer.bench.prof import benchmark


@pytest.mark.full
def test_each_case_has_a_row_with_a_goal() -> None:
    rows = benchmark.run(benchmark.Spec(rounds=1, seconds=0.5))
    assert [row.peer for row in rows] == ["limit"] * 6 + [
        "torch.profiler", "torch.profiler, with_stack",
    ]  # fmt: skip
    assert all(row.goal == 1.0 and row.ours > 0 for row in rows)
