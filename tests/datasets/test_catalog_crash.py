"""Publishers and removers killed at every call: a version is absent or whole, and nothing is in the way."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import draws

from fireflyer.datasets import Catalog
from fireflyer.errors import NoSuchDataset

Records = Callable[..., list[Path]]
DieAt = Callable[[int], None]
Forked = Callable[[Callable[[], None]], int]


@pytest.mark.sample(1)
@pytest.mark.parametrize("readers", [None, ["bob"]])
def test_a_publisher_killed_at_any_call(
    tmp_path: Path, records: Records, forked: Forked, die_at: DieAt, readers: list[str] | None
) -> None:
    paths = records(20, 2)
    Catalog(tmp_path / "base").publish("a", paths, licence="x")
    root = tmp_path / "root"

    def victim(call: int) -> None:
        die_at(call)
        Catalog(root).publish("a", paths, licence="x", version=2, readers=readers)

    outcomes = []
    call = 0
    for call in draws.points("publisher", 400):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "base", root)
        status = forked(lambda at=call: victim(at))  # type: ignore[misc]
        assert status in (0, -signal.SIGKILL)
        catalog = Catalog(root)
        catalog.get("a", 1).verify()
        versions = [d.manifest.version for d in catalog.list("a")]
        outcomes.append(len(versions) == 2)
        if 2 in versions:
            catalog.get("a", 2).verify()
            assert catalog.get("a").open().n == 20
        else:
            with pytest.raises(NoSuchDataset):
                catalog.get("a", 2)
            again = catalog.publish("a", paths, licence="x", version=2)
            again.verify()
            assert (root / "a" / "@2").stat().st_mode & 0o055 == 0o055
        catalog.sweep(-1.0)
        kept = {d.manifest.data for d in catalog.list("a")}
        assert {path.name for path in root.rglob("data-*")} == kept
        if status == 0:
            break
    assert call > 15
    assert outcomes == sorted(outcomes), "once it is there it stays"
    assert outcomes[-1]
    assert outcomes[-2] or not draws.full(), "killed behind the manifest: published"
    assert not outcomes[0] or not draws.full()


def test_a_remover_killed_at_any_call(
    tmp_path: Path, records: Records, forked: Forked, die_at: DieAt
) -> None:
    for _ in range(2):
        Catalog(tmp_path / "base").publish("a", records(20, 2), licence="x")
    root = tmp_path / "root"

    def victim(call: int) -> None:
        die_at(call)
        Catalog(root).remove("a", 2)

    outcomes = set()
    call, status = 0, -signal.SIGKILL
    while status != 0:
        call += 1
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "base", root)
        status = forked(lambda at=call: victim(at))  # type: ignore[misc]
        catalog = Catalog(root)
        versions = [d.manifest.version for d in catalog.list("a")]
        outcomes.add(len(versions))
        for dataset in catalog.list("a"):
            dataset.verify()
        assert catalog.publish("a", records(3), licence="x").manifest.version == 3
        catalog.sweep(-1.0)
        kept = {d.manifest.data for d in catalog.list("a")}
        assert {path.name for path in root.rglob("data-*")} == kept
    assert outcomes == {1, 2}
    assert call > 4
