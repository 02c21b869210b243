"""Publishing sources that others change meanwhile: a version that opens and holds, or one typed error."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fireflyer.datasets import Catalog
from fireflyer.errors import Corrupted
from fireflyer.ffrecord import FileWriter
from fireflyer.storage import open_storage

counter = itertools.count()


@pytest.fixture(params=["directory", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://publish-moving-{next(counter)}"
    return str(tmp_path / "root")


def disturbed(root: str, before: Callable[[], None], after: Callable[[], None]) -> Any:
    """A storage that calls `before` the first byte of a record file is read, and `after` the last was."""
    storage = open_storage(root)

    class Disturbed:
        def __getattr__(self, name: str) -> Any:
            return getattr(storage, name)

        def write(self, name: str, chunks: Any) -> None:
            before()
            storage.write(name, chunks)
            after()

    return Disturbed()


def nothing() -> None:
    pass


@pytest.mark.parametrize("late", [False, True])
def test_a_commit_while_a_source_is_published_is_in_it_whole_or_not_at_all(
    root: str, tmp_path: Path, late: bool
) -> None:
    source = tmp_path / "grow.ffr"
    with FileWriter(source, version=2) as writer:
        writer.write_one(b"x" * 100)

    def add() -> None:
        with FileWriter.append(source) as writer:
            writer.write_one(b"y")

    storage = disturbed(root, nothing if late else add, add if late else nothing)
    made = Catalog(storage).publish("grow", source, licence="x")
    found = Catalog(root).get("grow")
    assert (made.n, found.n, found.open().n) == ((1,) * 3 if late else (2,) * 3)
    found.verify()


def test_a_source_damaged_after_it_was_opened_is_not_published(root: str, tmp_path: Path) -> None:
    source = tmp_path / "a.ffr"
    with FileWriter(source) as writer:
        writer.write_one(b"x" * 100)

    def damage() -> None:
        content = source.read_bytes()
        source.write_bytes(content[:-1] + b"z")

    with pytest.raises(Corrupted, match=r"cannot publish .*a\.ffr: damaged, or changed"):
        Catalog(disturbed(root, damage, nothing)).publish("a", source, licence="x")
    assert Catalog(root).list() == []
    assert open_storage(root).list("a/@1") == []
