"""What is shipped is there whole, or not at all; bytes have their hash; users do not see each other."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import draws

from fireflyer.errors import Corrupted, WorkspaceError
from fireflyer.hai.workspaces.blob_store import BlobStore
from fireflyer.hai.workspaces.materialize import place_task
from fireflyer.hai.workspaces.snapshot import Snapshot, take
from fireflyer.hai.workspaces.stream import Begun, Ended, Splitter, head

FILES = {"train.py": b"print(1)", "lib/a.py": b"a", "lib/same.py": b"a", "none": b""}


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    root = tmp_path / "source"
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return take(root)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    (tmp_path / "home").mkdir()
    made = BlobStore(tmp_path / "home" / "workspaces")
    made.open()
    return made


def body(snapshot: Snapshot, missing: tuple[str, ...]) -> bytes:
    data = {sha256: path.read_bytes() for sha256, path in snapshot.source().items()}
    return b"".join(head(sha256, len(data[sha256])) + data[sha256] for sha256 in missing)


def upload(store: BlobStore, data: bytes, user: str = "", piece: int = 7) -> None:
    receiver = store.receive(user)
    try:
        for at in range(0, len(data), piece):
            receiver.feed(data[at : at + piece])
        receiver.finish()
    finally:
        receiver.close()


def ship(store: BlobStore, snapshot: Snapshot, user: str = "") -> str:
    offer = store.offer(snapshot.manifest, user)
    if offer.missing:
        upload(store, body(snapshot, offer.missing), user)
        offer = store.offer(snapshot.manifest, user)
    assert offer.missing == ()
    return offer.id


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_only_what_is_missing_is_asked_for(store: BlobStore, snapshot: Snapshot) -> None:
    assert len(store.offer(snapshot.manifest, "").missing) == 3
    assert store.views("") == []
    name = ship(store, snapshot)
    assert [(v.id, v.files, v.bytes) for v in store.views("")] == [(name, 4, 10)]
    (snapshot.root / "lib/a.py").write_bytes(b"changed")
    assert len(store.offer(take(snapshot.root).manifest, "").missing) == 1


def test_a_copy_shares_nothing_and_is_made_once(
    store: BlobStore, snapshot: Snapshot, tmp_path: Path
) -> None:
    name, folder = ship(store, snapshot), tmp_path / "copy"
    place_task(store, name, "", folder)
    assert contents(folder) == FILES
    (folder / "lib/a.py").write_bytes(b"by the task")
    place_task(store, name, "", folder)
    assert (folder / "lib/a.py").read_bytes() == b"by the task"
    place_task(store, name, "", tmp_path / "other")
    assert contents(tmp_path / "other") == FILES


def test_a_wrong_hash_is_refused_and_leaves_nothing(store: BlobStore, snapshot: Snapshot) -> None:
    first = store.offer(snapshot.manifest, "").missing[0]
    with pytest.raises(WorkspaceError, match="does not match its hash"):
        upload(store, head(first, 3) + b"bad")
    with pytest.raises(WorkspaceError, match="in the middle of a blob"):
        upload(store, head(first, 3) + b"ba")
    with pytest.raises(WorkspaceError, match="longer than"):
        upload(store, head(first, 1 << 40))
    assert len(store.offer(snapshot.manifest, "").missing) == 3
    assert list((store._partial).iterdir()) == []


def test_a_spoiled_blob_is_noticed_when_used_and_healed(
    store: BlobStore, snapshot: Snapshot, tmp_path: Path
) -> None:
    name = ship(store, snapshot)
    blob = store.blob(next(iter(snapshot.manifest.blobs())))
    blob.write_bytes(bytes(len(blob.read_bytes())))
    with pytest.raises(Corrupted, match="ship the folder again"):
        place_task(store, name, "", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert ship(store, snapshot) == name
    place_task(store, name, "", tmp_path / "copy")
    assert contents(tmp_path / "copy") == FILES


def test_the_hash_of_a_file_is_no_key_to_it(store: BlobStore, snapshot: Snapshot) -> None:
    name = ship(store, snapshot, "ann")
    assert len(store.offer(snapshot.manifest, "bob").missing) == 3
    with pytest.raises(WorkspaceError, match="no workspace"):
        store.manifest(name, "bob")
    assert ship(store, snapshot, "bob") == name
    assert {view.user for view in store.views()} == {"ann", "bob"}
    for user in ("../ann", "", ".", "a/b"):
        assert store.views(user) == []


@pytest.mark.parametrize("name", ["", "..", "../../x", "A" * 64, "0" * 63, "0" * 65])
def test_odd_names(store: BlobStore, name: str) -> None:
    with pytest.raises(WorkspaceError, match="unknown workspace"):
        store.manifest(name, "")


def test_prune_keeps_what_is_needed(store: BlobStore, snapshot: Snapshot, tmp_path: Path) -> None:
    old = ship(store, snapshot)
    (snapshot.root / "train.py").write_bytes(b"print(2)")
    new = ship(store, take(snapshot.root))
    assert store.prune(0.0, ()).workspaces == 0
    future = 1e11
    gone = store.prune(future, {new})
    assert (gone.workspaces, gone.blobs, gone.bytes) == (1, 1, 8)
    with pytest.raises(WorkspaceError, match="no workspace"):
        store.manifest(old, "")
    place_task(store, new, "", tmp_path / "copy")
    assert store.prune(future, ()).workspaces == 1
    assert ship(store, take(snapshot.root)) == new


def test_bodies_are_split_wherever_they_are_cut() -> None:
    blobs = [b"", b"abc", b"x" * 100]
    data = b"".join(head(f"{i:064x}", len(blob)) + blob for i, blob in enumerate(blobs))
    for piece in (1, 2, 39, 40, 41, 1000):
        splitter = Splitter(100)
        found: list[bytes] = []
        open_ = False
        for at in range(0, len(data), piece):
            for part in splitter.feed(data[at : at + piece]):
                if isinstance(part, Begun):
                    assert not open_
                    found.append(b"")
                elif isinstance(part, bytes):
                    found[-1] += part
                open_ = not isinstance(part, Ended)
        splitter.finish()
        assert found == blobs


class Killer:
    """Replaces calls of `os` in this process by ones that end it at the n-th."""

    NAMES = (
        "open",
        "replace",
        "rename",
        "fsync",
        "mkdir",
        "write",
        "unlink",
        "fchmod",
        "symlink",
        "close",
    )

    def __init__(self, left: int) -> None:
        self.left = left
        for name in self.NAMES:
            setattr(os, name, self._counting(getattr(os, name)))

    def _counting(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **options: object) -> object:
            self.left -= 1
            if self.left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return counted


def killed_at(point: int, act: Callable[[], None]) -> bool:
    """Runs `act` in a forked child that is killed at a point; whether it was."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            Killer(point)
            act()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


def test_killed_at_any_point_there_is_a_whole_workspace_or_none(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    def act(home: Path) -> None:
        store = BlobStore(home / "workspaces")
        store.open()
        place_task(store, ship(store, snapshot), "", home / "copy")

    points, order = 0, draws.drawn("store order")
    for point in draws.points("store", 399):
        home = tmp_path / f"home{point}"
        home.mkdir()
        killed = killed_at(point, lambda home=home: act(home))  # type: ignore[misc]
        store = BlobStore(home / "workspaces")
        if (home / "workspaces/manifests").exists() and (home / "workspaces/blobs").exists():
            for view in store.views(""):
                store.open()
                place_task(store, view.id, "", home / "proof")
                assert contents(home / "proof") == FILES
        assert not (home / "copy").exists() or contents(home / "copy") == FILES
        killed_at(order.randrange(1, 60), lambda home=home: act(home))  # type: ignore[misc]
        act(home)
        assert contents(home / "copy") == FILES
        assert sorted(p.name for p in home.iterdir()) in (
            ["copy", "workspaces"],
            ["copy", "proof", "workspaces"],
        )
        points = point
        if not killed:
            break
    assert 25 < points < 399
