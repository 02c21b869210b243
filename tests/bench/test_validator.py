"""The validator's benchmark: the triad is built, checks its own result, and is compared."""

from pathlib import Path

import pytest

from fireflyer.bench.peers.compiling import compiled
from fireflyer.bench.validator import memory
from fireflyer.errors import ConfigError


@pytest.mark.full
def test_memory_bandwidth_against_the_triad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(memory, "PASSES", 2)
    rows = memory.run(1, 4 << 20)
    assert rows
    for row in rows:
        assert row.case.startswith("memory bandwidth, node")
        assert (row.unit, row.peer, row.goal) == ("GB/s", "C triad", 0.95)
        assert row.ratio is not None
        assert row.ours > 0
    (program,) = (tmp_path / "fireflyer").iterdir()
    assert compiled(memory.SOURCE, memory.FLAGS) == program, "compiled once"


def test_a_source_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "bad.cpp"
    source.write_text("int main( {")
    with pytest.raises(ConfigError, match=r"cannot compile .*bad\.cpp"):
        compiled(source, ())
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"bad needs a C\+\+ compiler"):
        compiled(source, ())
