"""Files that cannot be read, and manifests that name what they must not: load goes back to an older one."""

import json
from pathlib import Path

import pytest
import torch

from fireflyer._native import crc32
from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CheckpointError, StorageError


def saved(directory: Path) -> None:
    manager = CheckpointManager(directory)
    for step in (1, 2, 3):
        manager.save(step, {"w": torch.full((1000,), float(step)), "n": step}).wait()


def make_unreadable(path: Path) -> None:
    """A manifest becomes a directory, a data file a link to itself: EISDIR and ELOOP, for root too."""
    path.unlink()
    if path.suffix == ".json":
        path.mkdir()
    else:
        path.symlink_to(path)


@pytest.mark.parametrize("role", ["manifest", "data"])
def test_load_skips_what_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    saved(tmp_path)
    path = next(tmp_path.glob(f"step-*3/{role}*"))
    make_unreadable(path)
    manager = CheckpointManager(tmp_path)
    assert (manager.latest(), manager.steps()) == (2, [1, 2])
    assert manager.load()["n"] == 2
    [record] = caplog.records
    assert str(path) in record.getMessage()
    assert "cannot be read" in record.getMessage()
    assert manager.load_tensors("w")["w"][0] == 2
    assert path.is_dir() or path.is_symlink()
    assert not (tmp_path / "damaged").exists()
    with pytest.raises(StorageError, match=path.name):
        manager.load(3)


def test_load_raises_when_nothing_can_be_read(tmp_path: Path) -> None:
    saved(tmp_path)
    for path in tmp_path.glob("step-*/data*"):
        make_unreadable(path)
    manager = CheckpointManager(tmp_path)
    with pytest.raises(StorageError, match=r"step-000000000003/data"):
        manager.load()
    with pytest.raises(StorageError, match=r"step-000000000003/data"):
        manager.load_tensors("w")


@pytest.mark.parametrize("lie", ["../victim/data.bin", "/etc/passwd", "claims/000001.json", "x"])
def test_a_manifest_that_names_a_foreign_file_is_damaged(tmp_path: Path, lie: str) -> None:
    (tmp_path / "victim").mkdir()
    victim = tmp_path / "victim" / "data.bin"
    run = tmp_path / "run"
    saved(run)
    data = next(run.glob("step-*3/data*"))
    victim.write_bytes(data.read_bytes())
    path = next(run.glob("step-*3/manifest*"))
    text = json.dumps(json.loads(path.read_bytes())["body"], separators=(",", ":"))
    body = text.replace(str(data.relative_to(run)), lie).encode()
    path.write_bytes(b'{"crc32":%d,"body":%s}' % (crc32(body), body))
    manager = CheckpointManager(run, keep=2)
    assert manager.steps() == [1, 2]
    manager.save(4, {"n": 4}).wait()
    assert manager.steps() == [2, 4]
    with pytest.raises(CheckpointError, match="no good checkpoint of step 3"):
        manager.load(3)
    assert manager.load(2)["n"] == 2
    assert victim.exists()
