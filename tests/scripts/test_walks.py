"""The walks of ARCHITECTURE.md: short, straight, along files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_STEPS = 8


def walks() -> dict[str, list[str]]:
    """Returns the files of each walk by its heading."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = re.search(r"^## Walks\n(.*?)^## ", text, re.M | re.S)
    assert section is not None
    _, *parts = re.split(r"^### ", section[1], flags=re.M)
    return {part.partition("\n")[0]: re.findall(r"^\d+\. `([^`]+)`", part, re.M) for part in parts}


def test_there_are_walks() -> None:
    assert {"A gradient", "A checkpoint", "A file write", "A task"} <= walks().keys()


@pytest.mark.parametrize("name", walks())
def test_a_walk_is_short_and_visits_no_file_twice(name: str) -> None:
    files = walks()[name]
    assert 2 <= len(files) <= MOST_STEPS + 1
    assert len(set(files)) == len(files)
    assert [file for file in files if not (ROOT / file).is_file()] == []
