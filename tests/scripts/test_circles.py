"""scripts/circles.py: circles of imports, wherever a module imports."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "circles.py"
_spec = importlib.util.spec_from_file_location("circles", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
circles = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(circles)

PLACES = {
    "at the top": "from part import lower\n",
    "in a function": "def use() -> None:\n    import part.lower\n",
    "for types": "if TYPE_CHECKING:\n    from part.lower import Name\n",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_circle_is_found_wherever_the_import_is(place: str, tmp_path: Path) -> None:
    package = tmp_path / "part"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lower.py").write_text("from part.upper import Thing\n")
    (package / "upper.py").write_text("import os\n")
    assert circles.circle(tmp_path) == []
    (package / "upper.py").write_text(PLACES[place])
    found = circles.circle(tmp_path)
    assert found[0] == found[-1]
    assert set(found) == {"part.lower", "part.upper"}
