"""The documentation site is built without a warning, and loads nothing from elsewhere."""

import re
import subprocess
from pathlib import Path

import pytest
from tests.docs.pages import ROOT

LOADED = re.compile(
    r'<(?:script|img|iframe)[^>]*\bsrc="?(?:https?:)?//|<link[^>]*\bhref="?https?://'
)


@pytest.mark.full
def test_the_site_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run(["scripts/site.sh", "--to", str(site)], cwd=ROOT, check=True)
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    assert len(texts) > 100
    assert [path.name for path, text in texts.items() if LOADED.search(text)] == []
    assert "CheckpointManager" in texts[site / "reference/api/checkpoint.html"]
    assert "--max-restarts" in texts[site / "reference/cli/run.html"]
