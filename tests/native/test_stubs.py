"""The committed type stubs are those of the built module."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_committed_stubs_are_current(tmp_path: Path) -> None:
    subprocess.run(["scripts/stubs.sh", str(tmp_path)], cwd=ROOT, check=True)
    committed = ROOT / "src/fireflyer/_native"
    names = {p.relative_to(tmp_path) for p in tmp_path.rglob("*.pyi")}
    assert names == {p.relative_to(committed) for p in committed.rglob("*.pyi")}
    for name in names:
        assert (tmp_path / name).read_text() == (committed / name).read_text(), (
            f"run: make stubs ({name})"
        )
