"""The benchmark of environments compares what is installed."""

import pytest

from fireflyer.bench.envs import steps


@pytest.mark.full
def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "TURN_S", 0.001)
    rows = steps.run(("CartPole-v1", "ALE/Pong-v5"), (2, 65), 1, 1)
    found = {(row.case, row.peer) for row in rows}
    assert {
        ("CartPole-v1, 2 environments", "SyncVectorEnv"),
        ("CartPole-v1, 2 environments", "AsyncVectorEnv"),
        ("CartPole-v1, 2 environments, in 1 processes", "AsyncVectorEnv"),
        ("CartPole-v1, 65 environments", "SyncVectorEnv"),
        ("ALE/Pong-v5, 2 environments", "ale-py"),
    } <= found
    assert not any(case.startswith("ALE/Pong-v5, 65") for case, _ in found)
    assert all(row.ours > 0 for row in rows)
