"""The catalog in a directory and in memory: versions whole and fixed, names, readers, hostile manifests."""

import itertools
import json
import os
import pickle
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fireflyer.datasets import Catalog, DistributedLoader
from fireflyer.errors import (
    AccessDenied,
    ConfigError,
    Corrupted,
    NoSuchDataset,
    StorageError,
    VersionExists,
)
from fireflyer.ffrecord import ChunkCache, FileReader, FileWriter, RemoteFiles
from fireflyer.storage import DirectoryStorage, Storage, open_storage

Records = Callable[..., list[Path]]
NumberOf = Callable[[Any], int]
counter = itertools.count()


@pytest.fixture(params=["directory", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "root")
    return f"memory://catalog-test-{next(counter)}"


def files_under(storage: Storage, place: str = "") -> set[str]:
    found = set()
    for entry in storage.list(place):
        name = f"{place}/{entry}" if place else entry
        below = storage.list(name) if "." not in entry else []
        found |= files_under(storage, name) if below else {name}
    return found


def test_published_sets_are_found_opened_and_read(
    root: str, records: Records, number_of: NumberOf, tmp_path: Path
) -> None:
    catalog = Catalog(root, user="ann")
    paths = records(50)
    made = catalog.publish(
        "vision/small", paths, licence="CC0", description="fifty", schema={"bytes": "u8"}
    )
    assert (made.manifest.version, made.n, len(made)) == (1, 50, 50)
    found = Catalog(root, user="bob").get("vision/small")
    assert found.id == made.id
    assert found.manifest == made.manifest
    assert (found.manifest.owner, found.manifest.licence) == ("ann", "CC0")
    assert found.manifest.schema == {"bytes": "u8"}
    assert [(f.name, f.bytes) for f in found.manifest.files] == [
        (path.name, path.stat().st_size) for path in paths
    ]
    assert found.manifest.files[0].sha256 == sha256(paths[0].read_bytes()).hexdigest()
    found.verify()
    for dataset in (found, pickle.loads(pickle.dumps(found))):
        reader = dataset.open(ChunkCache(tmp_path / "cache", 1 << 24))
        assert isinstance(reader, FileReader if root[0] == "/" else RemoteFiles)
        assert [number_of(sample) for sample in reader.read(range(50))] == list(range(50))
    batches = list(DistributedLoader(found, 0, 1, seed=1, batch_size=7))
    assert sorted(number_of(s) for batch in batches for s in batch) == list(range(50))


def test_sets_with_columns_are_read_as_rows_wherever_they_are(root: str, tmp_path: Path) -> None:
    paths = []
    for number in range(2):
        paths.append(tmp_path / f"part{number}.ffr")
        columns: dict[str, Any] = {"label": "int64", "text": "str"}
        with FileWriter(paths[-1], columns=columns, compression="zstd") as writer:
            for i in range(20 * number, 20 * number + 20):
                writer.write_row({"label": i, "text": f"word {i} " * 9})
    made = Catalog(root).publish("rows", paths, licence="x")
    made.verify()
    for _ in range(2):  # the second time with a warm cache
        loader = DistributedLoader(
            made, 0, 1, seed=1, batch_size=7, cache=ChunkCache(tmp_path / "cache", 1 << 24)
        )
        rows = [row for batch in loader for row in batch]
        assert sorted(int(row["label"]) for row in rows) == list(range(40))
        assert all(row["text"] == f"word {row['label']} " * 9 for row in rows)


def test_plain_files_have_one_id_near_and_far(records: Records, tmp_path: Path) -> None:
    """Of both versions; it changes with the contents."""
    ids = []
    for word in ("old", "new"):
        with FileWriter(path := tmp_path / "v2.ffr", version=2) as writer:
            for i in range(3000):
                writer.write_one(f"{word} {i}".encode())
        near = [path, *records(9)]
        far = open_storage(f"memory://plain-{next(counter)}")
        for local in near:
            far.write(local.name, [local.read_bytes()])
        urls = [f"{far}/{local.name}" for local in near]
        loaders = [DistributedLoader(paths, 0, 1, seed=1, batch_size=7) for paths in (near, urls)]
        assert loaders[0].dataset_id == loaders[1].dataset_id
        ids.append(loaders[0].dataset_id)
    assert ids[0] != ids[1]


def test_versions_count_up_and_the_newest_is_the_default(root: str, records: Records) -> None:
    catalog = Catalog(root)
    for n in (5, 6):
        catalog.publish("a", records(n), licence="x")
    catalog.publish("a", records(7), licence="x", version=10)
    catalog.publish("b/c", records(8), licence="x")
    assert [d.manifest.version for d in catalog.list("a")] == [1, 2, 10]
    assert [(d.manifest.name, d.n) for d in catalog.list()] == [("a", 7), ("b/c", 8)]
    assert catalog.get("a").n == 7
    assert catalog.get("a", 2).n == 6
    assert catalog.publish("a", records(9), licence="x").manifest.version == 11
    for name, version in (("a", 3), ("b", None), ("b/c", 2)):
        with pytest.raises(NoSuchDataset):
            catalog.get(name, version)
    assert catalog.list("nothing") == []


def test_a_version_never_changes_and_a_removed_number_stays_used(
    root: str, records: Records
) -> None:
    catalog = Catalog(root, user="ann")
    first = catalog.publish("a", records(5), licence="x")
    with pytest.raises(VersionExists, match="never changes"):
        catalog.publish("a", records(6), licence="x", version=1)
    assert catalog.get("a").id == first.id
    with pytest.raises(AccessDenied, match="belongs to ann"):
        Catalog(root, user="bob").remove("a", 1)
    catalog.remove("a", 1)
    assert catalog.list() == []
    with pytest.raises(NoSuchDataset):
        catalog.get("a")
    with pytest.raises(VersionExists):
        catalog.publish("a", records(6), licence="x", version=1)
    assert catalog.publish("a", records(6), licence="x").manifest.version == 2
    left = files_under(open_storage(root))
    assert {name for name in left if "@1" in name} == {"a/@1/removed.json"}


@pytest.mark.parametrize(
    "name",
    ["", "..", "a/../b", "/a", "a/", "a//b", "A", "a b", "-a", ".a", "a/.b", "a\0", "a\n", "a/b/c/d/e",
     "x" * 65, "@1", "a/@1", "ä"],
)  # fmt: skip
def test_names_that_could_lead_elsewhere_are_refused(
    tmp_path: Path, records: Records, name: str
) -> None:
    catalog = Catalog(tmp_path / "root")
    for call in (
        lambda: catalog.publish(name, records(3), licence="x"),
        lambda: catalog.get(name),
        lambda: catalog.list(name),
        lambda: catalog.remove(name, 1),
    ):
        with pytest.raises(ConfigError, match="invalid dataset name"):
            call()
    assert os.listdir(tmp_path / "root") == []


@pytest.mark.parametrize("version", [0, -1, 10**9, 1.0, "1", True])
def test_versions_are_whole_numbers(tmp_path: Path, records: Records, version: Any) -> None:
    catalog = Catalog(tmp_path)
    with pytest.raises(ConfigError, match="invalid version"):
        catalog.publish("a", records(3), licence="x", version=version)
    with pytest.raises(ConfigError, match="invalid version"):
        catalog.get("a", version)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"licence": 3}, "licence"),
        ({"description": None}, "description"),
        ({"owner": "a\nb"}, "invalid user name"),
        ({"readers": [""]}, "invalid user name"),
        ({"readers": "ann"}, "a list of names"),
        ({"schema": {"a": float("nan")}}, "not JSON"),
        ({"schema": [-float("inf")]}, "not JSON"),
        ({"schema": {1, 2}}, "not JSON|cannot publish"),
        ({"schema": object()}, "not JSON|cannot publish"),
    ],
)
def test_what_a_manifest_cannot_say_is_refused_before_copying(
    root: str, records: Records, change: dict[str, Any], match: str
) -> None:
    options: dict[str, Any] = {"licence": "x", **change}
    if isinstance(change.get("schema"), set):
        # A set is an array in JSON: it may be said.
        assert Catalog(root).publish("a", records(3), **options).n == 3
        return
    with pytest.raises(ConfigError, match=match):
        Catalog(root).publish("a", records(3), **options)
    assert files_under(open_storage(root)) == set()


def test_sources_are_verified_and_named_apart(tmp_path: Path, records: Records) -> None:
    catalog = Catalog(tmp_path / "root")
    one, two = records(5, 1, "one"), records(5, 1, "two")
    with pytest.raises(ConfigError, match="same name"):
        catalog.publish("a", one + two, licence="x")
    (hidden := tmp_path / "one" / "-odd.ffr").write_bytes(one[0].read_bytes())
    with pytest.raises(ConfigError, match="invalid record file name"):
        catalog.publish("a", [hidden], licence="x")
    content = bytearray(one[0].read_bytes())
    content[-1] ^= 1
    one[0].write_bytes(content)
    with pytest.raises(Corrupted, match="sample 4"):
        catalog.publish("a", one, licence="x")
    with pytest.raises(StorageError):
        catalog.publish("a", tmp_path / "missing.ffr", licence="x")
    assert catalog.list() == []


def test_private_sets_are_seen_by_their_readers_alone(root: str, records: Records) -> None:
    ann = Catalog(root, user="ann")
    ann.publish("open", records(3), licence="x")
    ann.publish("secret", records(3), licence="x", readers=["bob"])
    ann.publish("own", records(3), licence="x", readers=[])
    names = {
        user: [d.manifest.name for d in Catalog(root, user=user).list()]
        for user in ("ann", "bob", "eve")
    }
    assert names == {
        "ann": ["open", "own", "secret"],
        "bob": ["open", "secret"],
        "eve": ["open"],
    }
    assert Catalog(root, user="bob").get("secret").n == 3
    with pytest.raises(AccessDenied, match="ask ann to name eve a reader"):
        Catalog(root, user="eve").get("secret")
    with pytest.raises(AccessDenied):
        Catalog(root, user="bob").get("own", 1)


def test_modes_close_private_versions(tmp_path: Path, records: Records) -> None:
    catalog = Catalog(tmp_path / "root")
    for name, readers in (("own", []), ("some", ["bob"]), ("all", None)):
        catalog.publish(name, records(3), licence="x", readers=readers)
    modes = [
        (tmp_path / "root" / name / "@1").stat().st_mode & 0o777 for name in ("own", "some", "all")
    ]
    assert modes[:2] == [0o700, 0o750]
    assert modes[2] & 0o055 == 0o055


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_another_user_of_the_machine_cannot_enter(
    public_path: Path, records: Records, forked: Callable[[Callable[[], None]], int]
) -> None:
    root = public_path / "root"
    catalog = Catalog(root, user="root")
    catalog.publish("open", records(3), licence="x")
    secret = catalog.publish("secret", records(3), licence="x", readers=[])

    def stranger() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        liar = Catalog(root, user="root")
        assert [d.manifest.name for d in liar.list()] == ["open"]
        with pytest.raises(AccessDenied, match="private"):
            liar.get("secret")
        with pytest.raises(StorageError):
            secret.open()

    assert forked(stranger) == 0


def test_two_publishers_of_one_version(root: str, records: Records) -> None:
    """The second comes while the first is between its last look and its manifest."""
    storage = open_storage(root)
    rival = Catalog(root, user="bob")

    class Raced:
        """A storage on which the rival publishes right before the first manifest is created."""

        def __getattr__(self, name: str) -> Any:
            return getattr(storage, name)

        def create(self, name: str, data: bytes) -> bool:
            if name == "a/@1/manifest.json" and storage.size(name) is None:
                rival.publish("a", records(5), licence="x", version=1)
            return storage.create(name, data)

    raced: Any = Raced()
    with pytest.raises(VersionExists, match="at the same time"):
        Catalog(raced, user="ann").publish("a", records(6), licence="x", version=1)
    winner = rival.get("a")
    assert (winner.manifest.owner, winner.n) == ("bob", 5)
    winner.verify()
    [data] = [entry for entry in storage.list("a/@1") if entry.startswith("data-")]
    assert data == winner.manifest.data, "the loser took its data away"


def test_the_loser_without_a_version_takes_the_next(root: str, records: Records) -> None:
    storage = open_storage(root)

    class Raced:
        def __getattr__(self, name: str) -> Any:
            return getattr(storage, name)

        def create(self, name: str, data: bytes) -> bool:
            if name == "a/@1/manifest.json" and storage.size(name) is None:
                Catalog(root).publish("a", records(5, folder="rival"), licence="x")
            return storage.create(name, data)

    raced: Any = Raced()
    made = Catalog(raced).publish("a", records(6), licence="x")
    assert (made.manifest.version, made.n) == (2, 6)
    assert [d.n for d in Catalog(root).list("a")] == [5, 6]


def test_where_create_cannot_arbitrate_what_is_there_in_the_end_decides(
    tmp_path: Path, records: Records
) -> None:
    storage = DirectoryStorage(tmp_path / "root")
    other = b""

    class LastWins:
        """An object store on which another's manifest lands right behind ours."""

        def __getattr__(self, name: str) -> Any:
            return getattr(storage, name)

        def create(self, name: str, data: bytes) -> bool:
            storage.write(name, [data])
            storage.write(name, [other])
            return True

    Catalog(storage, user="bob").publish("a", records(5), licence="x")
    other = storage.read("a/@1/manifest.json")
    storage.delete("a/@1/manifest.json")
    last_wins: Any = LastWins()
    with pytest.raises(VersionExists):
        Catalog(last_wins, user="ann").publish("a", records(6), licence="x", version=1)
    assert Catalog(storage).get("a").n == 5


def test_damaged_data_is_found(root: str, records: Records) -> None:
    catalog = Catalog(root)
    dataset = catalog.publish("a", records(20, 2), licence="x")
    storage = open_storage(root)
    place = f"a/@1/{dataset.manifest.data}"
    name = f"{place}/{dataset.manifest.files[1].name}"
    good = storage.read(name)
    for bad, error in ((good[:-1], Corrupted), (good + b"\0", Corrupted), (None, StorageError)):
        if bad is None:
            storage.delete(name)
        else:
            storage.write(name, [bad])
        with pytest.raises(error):
            catalog.get("a").open()
        with pytest.raises(error):
            catalog.get("a").verify()
    storage.write(name, [good[:-1] + bytes([good[-1] ^ 1])])
    with pytest.raises(Corrupted, match="SHA-256"):
        catalog.get("a").verify()
    with pytest.raises(Corrupted, match="sample 9"):
        catalog.get("a").open().read([19])
    # Another whole record file of the same size is not what the manifest says either.
    storage.write(name, [storage.read(f"{place}/{dataset.manifest.files[0].name}")])
    with pytest.raises(Corrupted):
        catalog.get("a").verify()


def enveloped(body: bytes) -> bytes:
    return b'{"sha256":"' + sha256(body).hexdigest().encode() + b'","body":' + body + b"}"


def hostile(body: dict[str, Any]) -> list[bytes]:
    """Manifests with a right checksum that lie."""
    file = body["files"][0]
    changed: list[dict[str, Any]] = [
        {"format": 2},
        {"name": "other"},
        {"version": 2},
        {"version": "1"},
        {"data": ".."},
        {"data": "data-00000000-0000000000000000/../.."},
        {"owner": ""},
        {"readers": "bob"},
        {"files": []},
        {"files": [file, file]},
        {"files": {}},
        {"extra": 1},
        *(
            {"files": [{**file, **change}]}
            for change in (
                {"name": "../../../etc/passwd"},
                {"name": "/etc/passwd.ffr"},
                {"name": "a/b.ffr"},
                {"name": ".hidden.ffr"},
                {"name": "a\0.ffr"},
                {"samples": -1},
                {"samples": 2**62},
                {"bytes": 1.5},
                {"sha256": "0" * 63},
                {"mode": 1},
            )
        ),
        {"files": [{**file, "name": f"{i}.ffr", "samples": 2**61} for i in range(4)]},
    ]
    bodies = [json.dumps({**body, **change}).encode() for change in changed]
    bodies += [b"[]", b"null", b"{}", b"[" * 200_000, b'{"schema":' * 5000, b"\xff\xfe", b""]
    return [enveloped(one) for one in bodies]


def test_hostile_manifests_are_corrupted_and_never_followed(
    root: str, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = Catalog(root)
    catalog.publish("a", records(3), licence="x")
    catalog.publish("b", records(4), licence="x")
    storage = open_storage(root)
    good = storage.read("a/@1/manifest.json")
    body = json.loads(good)["body"]
    texts = [*hostile(body), b"", b"{}", good[:-1], good + b" x", b"\0" * 100]
    for text in texts:
        storage.write("a/@1/manifest.json", [text])
        with pytest.raises(Corrupted, match=r"a/@1/manifest\.json"):
            catalog.get("a")
        caplog.clear()
        assert [d.manifest.name for d in catalog.list()] == ["b"]
        assert "a/@1/manifest.json" in caplog.text
        assert catalog.sweep(0.0) == [], "nothing is deleted beside a manifest one cannot read"
    storage.write("a/@1/manifest.json", [good])
    assert catalog.get("a").n == 3


def test_every_flipped_byte_of_a_manifest_is_found(tmp_path: Path, records: Records) -> None:
    catalog = Catalog(tmp_path)
    catalog.publish("a", records(3), licence="x", schema=[1, "two"])
    path = tmp_path / "a" / "@1" / "manifest.json"
    good = path.read_bytes()
    assert msgspec.json.decode(good)["body"]["schema"] == [1, "two"]
    for index in range(len(good)):
        flipped = bytearray(good)
        flipped[index] ^= 1 << index % 7
        path.write_bytes(flipped)
        with pytest.raises(Corrupted):
            catalog.get("a")
        path.write_bytes(good[:index])
        with pytest.raises(Corrupted):
            catalog.get("a")


def test_a_manifest_too_long_is_not_read(tmp_path: Path, records: Records) -> None:
    catalog = Catalog(tmp_path)
    catalog.publish("a", records(3), licence="x")
    os.truncate(tmp_path / "a" / "@1" / "manifest.json", 1 << 30)
    with pytest.raises(Corrupted, match="1073741824 bytes"):
        catalog.get("a")


def test_strange_neighbours_are_passed_over(tmp_path: Path, records: Records) -> None:
    catalog = Catalog(tmp_path)
    catalog.publish("a", records(3), licence="x")
    (tmp_path / "readme.md").write_text("hello")
    (tmp_path / "Upper").mkdir()
    (tmp_path / "a" / "@x").mkdir()
    (tmp_path / "a" / "@01").mkdir()
    (tmp_path / "b").mkdir()
    assert [d.manifest.name for d in catalog.list()] == ["a"]


def test_sweep_takes_what_no_version_owns_once_it_is_old(root: str, records: Records) -> None:
    catalog = Catalog(root)
    kept = catalog.publish("a", records(3), licence="x")
    storage = open_storage(root)
    old, new = (
        f"data-{int(time.time()) - 100:08x}-{7:016x}",
        f"data-{int(time.time()):08x}-{8:016x}",
    )
    for directory in (f"a/@1/{old}", f"a/@2/{old}", f"a/@1/{new}"):
        storage.write(f"{directory}/x.ffr", [b"x"])
    assert catalog.sweep(50.0) == [f"a/@1/{old}", f"a/@2/{old}"]
    assert catalog.sweep(50.0) == []
    kept.verify()
    assert storage.size(f"a/@1/{new}/x.ffr") == 1


@pytest.mark.parametrize("verified", [False, True])
def test_a_publisher_whose_data_was_swept_does_not_publish(
    root: str, records: Records, verified: bool
) -> None:
    storage = open_storage(root)

    class Swept:
        """A storage that sweeps with no mercy behind the last file, at once or after the verification."""

        def __getattr__(self, name: str) -> Any:
            return getattr(storage, name)

        def write(self, name: str, chunks: Any) -> None:
            storage.write(name, chunks)
            if name.endswith("PART_00002.ffr") and not verified:
                assert len(Catalog(root).sweep(-1.0)) == 1

        def list(self, name: str = "") -> list[str]:
            if verified and name == "a/@1":
                assert len(Catalog(root).sweep(-1.0)) == 1
            return storage.list(name)

    swept: Any = Swept()
    with pytest.raises(
        StorageError, match="is missing from its data" if verified else "it does not exist"
    ):
        Catalog(swept).publish("a", records(6), licence="x")
    assert Catalog(root).list() == []
