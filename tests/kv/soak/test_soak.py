"""A short soak of the store and the page cache on fs3; `make soak-kv` runs for ten minutes."""

import pytest
from tests.kv.soak.soak import soak


@pytest.mark.full
def test_nothing_is_lost_while_everything_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_FS", "")
    wrong, counts, kills = soak(20.0, 3)
    assert not wrong
    assert counts["writer acknowledged"] > 20
    assert sum(kills.values()) > 5
