"""The examples of docs/guide/data/checkpoint-faces.md, for the tests that run them."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[4] / "docs" / "guide" / "data" / "checkpoint-faces.md"


def run_example(section: str, names: dict[str, Any]) -> dict[str, Any]:
    """Runs the Python block of a section with `names` defined; returns all names afterwards."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 13
    exec(compile(code, f"{PAGE.name}: {section}", "exec"), names)
    return names
