"""Trees that are deeper than any path can say: walks go by the inodes of directories."""

import json
import os
from collections.abc import Callable, Iterator

import pytest
from tests.fs3.client.conftest import Cluster

from fireflyer.cli.fs import impl_changes, impl_queries
from fireflyer.errors import FileError
from fireflyer.fs3 import survey
from fireflyer.fs3.client import Client
from fireflyer.fs3.meta.inode import PATH_MAX, Inode

NAME = "d" * 250
LEVELS = 15
"""Of a tree that a path still reaches."""
TREES = 3


@pytest.fixture
def deep(fs: Client, calm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """/t: trees below each other, with a file of 6,000 bytes at the bottom. Verbs find this cluster."""
    for module in (impl_changes, impl_queries):
        monkeypatch.setattr(module, "attach", lambda *_, **__: calm.connect())
    fs.makedirs("/t" + f"/{NAME}" * LEVELS)
    with fs.open("/t" + f"/{NAME}" * LEVELS + "/file", "xb") as file:
        file.write(b"bottom" * 1000)
    for _ in range(TREES - 1):
        fs.makedirs("/u" + f"/{NAME}" * LEVELS)
        fs.rename("/t", "/u" + f"/{NAME}" * LEVELS + "/x")
        fs.rename("/u", "/t")
    yield fs
    impl_changes.rm(None, ["/t"], recursive=True, force=True)


def test_walks_reach_the_bottom(deep: Client, capsys: pytest.CaptureFixture[str]) -> None:
    directories = TREES * (LEVELS + 1)
    found = list(survey.tree(deep, "/t"))
    assert len(found) == directories + 1
    assert found[-1].name == "file"
    assert len(found[-1].path) > 2 * PATH_MAX
    assert [path for path, _, _ in deep.walk("/t")] == [one.path for one in found if one.is_dir]
    checked = survey.check(deep, "/t", lambda _: None)
    assert (checked.files, checked.bytes) == (1, 6000)
    assert not checked.damages
    assert not checked.unvisited
    assert impl_queries.du(None, ["/t"], json=True) == 0
    (usage,) = json.loads(capsys.readouterr().out)
    assert (usage["bytes"], usage["files"], usage["directories"]) == (6000, 1, directories)
    assert impl_queries.find(None, "/t", "file", "f", json=False) == 0
    assert capsys.readouterr().out == found[-1].path + "\n"
    impl_changes.rm(None, ["/t"], recursive=True, force=False)
    assert deep.listdir("/") == []


def test_what_cannot_be_listed_is_told(
    deep: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = deep.inode("/t" + f"/{NAME}" * 3).number
    entries_of = Client.entries_of

    def refused(its: Client, directory: int) -> Iterator[tuple[str, Inode]]:
        if directory == bad:
            raise FileError(13, f"inode {bad}")
        return entries_of(its, directory)

    path = "/t" + f"/{NAME}" * 3
    with monkeypatch.context() as patch:
        patch.setattr(Client, "entries_of", refused)
        checked = survey.check(deep, "/t", lambda _: None)
        assert [one.path for one in checked.unvisited] == [path]
        verbs: list[Callable[[], int]] = [
            lambda: impl_queries.du(None, ["/t"], json=False),
            lambda: impl_queries.find(None, "/t", None, None, json=True),
            lambda: impl_changes.rm(None, ["/t"], recursive=True, force=False),
        ]
        for verb in verbs:
            assert verb() == 1
            assert f"{path}: {os.strerror(13)}" in capsys.readouterr().err


def test_a_tree_has_no_deepest_level() -> None:
    status = os.stat_result((0o40755, *(0,) * 9))
    at = survey.Found("/top/", status)
    for _ in range(100_000):
        at = survey.Found("d", status, at)
    assert at.path == "/top/" + "d/" * 99_999 + "d"
