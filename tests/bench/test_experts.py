"""The benchmark of experts compares our store with raw reads and other loaders."""

from pathlib import Path

import pytest

from fireflyer.bench.experts import switches


@pytest.mark.full
def test_rows(tmp_path: Path) -> None:
    rows = switches.run(17 << 20, tmp_path / "work", 1, lambda _: None)
    assert [(row.case, row.peer) for row in rows] == [
        ("switch to a cold expert", "raw O_DIRECT of the bytes"),
        ("switch to a cold expert", "torch.load, cold"),
        ("switch to a cold expert", "safetensors, cold"),
        ("switch to a warm expert", "torch.load, cold"),
        ("hit rate, zipf, hints", "LRU"),
        ("hit rate, bursty, hints", "LRU"),
    ]
    assert all(row.ours > 0 for row in rows)
    assert all(row.ratio >= 1 for row in rows[-2:] if row.ratio is not None)
    assert not (tmp_path / "work").exists()
