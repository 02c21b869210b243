"""The check of docstrings and comments finds what it is for, and nothing else."""

from pathlib import Path

from scripts.prose import native_findings, python_findings

PYTHON = '''"""What a module is for."""

LIMIT = 3
"""How many of them."""
SAID = "somebody"


def ask() -> None:
    """Asks the rank; whoever answers first is right."""
    # Nobody answers twice.
    print("he said")
'''

NATIVE = """// A rank that waits until somebody comes.
const char* said = "whoever";  // it lets him in
int he = 1;

// Whether it lets one in.
// What follows continues the block.
bool open();  // What is open
#include "door.hpp"
  // Of both doors.
"""


def test_python(tmp_path: Path) -> None:
    path = tmp_path / "asked.py"
    path.write_text(PYTHON)
    found = [line.removeprefix(f"{path}:").split(":")[0] for line in python_findings(path)]
    assert sorted(found, key=int) == ["1", "4", "9", "10"]


def test_native(tmp_path: Path) -> None:
    path = tmp_path / "asked.cpp"
    path.write_text(NATIVE)
    found = [line.removeprefix(f"{path}:").split(": ")[:2] for line in native_findings(path)]
    assert found == [
        ["1", "'somebody'"],
        ["2", "'him'"],
        ["5", "a comment opens with 'Whether'"],
        ["9", "a comment opens with 'Of'"],
    ]
