"""Packed folders: what comes back, and that a hostile tree of names does nothing."""

import os
import pickle
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import cases

from fireflyer.errors import ConfigError, Corrupted, StorageError
from fireflyer.ffrecord import FileReader, FileWriter, PackedFolder, open_folder, pack_folder
from fireflyer.ffrecord.name_tree import read_names

MAGIC = b"piouhjgbr"
FILES = {
    "b.txt": b"bee",
    "a/x.bin": bytes(range(256)),
    "a/x": b"",
    "a/deep/er/z": b"z" * 9999,
    "c d/é": b"accent",
    "Z": b"capital",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "empty").mkdir()
    return root


def with_tree(path: Path, files: int, tree: bytes) -> Path:
    with FileWriter(path, files + 1) as writer:
        for _ in range(files):
            writer.write_one(b"content")
        writer.write_one(MAGIC + tree)
    return path


def test_a_folder_comes_back(folder: Path, tmp_path: Path) -> None:
    pack_folder(folder, tmp_path / "p.ffr")
    with open_folder(tmp_path / "p.ffr") as packed:
        assert packed.num_files() == len(FILES)
        names = packed.list(list_dir=False, recursive=True)
        assert sorted(names) == sorted(FILES)
        assert [s.tobytes() for s in packed.read(names)] == [FILES[n] for n in names]
        assert packed.read_one(Path("a") / "x.bin").tobytes() == FILES["a/x.bin"]
    with pytest.raises(ValueError, match="closed"):
        packed.read_one("b.txt")


def test_order_is_sorted_and_depth_first_and_the_tree_is_the_pickle_of_the_original(
    folder: Path, tmp_path: Path
) -> None:
    pack_folder(folder, tmp_path / "p.ffr")
    reader = FileReader(tmp_path / "p.ffr")
    order = ["Z", "a/deep/er/z", "a/x", "a/x.bin", "b.txt", "c d/é"]
    assert [s.tobytes() for s in reader.read(range(6))] == [FILES[n] for n in order]
    last = reader.read_one(6).tobytes()
    assert last.startswith(MAGIC)
    expected: Any = OrderedDict(
        {
            "Z": 0,
            "a": OrderedDict(
                {"deep": OrderedDict({"er": OrderedDict({"z": 1})}), "x": 2, "x.bin": 3}
            ),
            "b.txt": 4,
            "c d": OrderedDict({"é": 5}),
            "empty": OrderedDict(),
        }
    )
    assert pickle.loads(last[len(MAGIC) :]) == expected
    pack_folder(folder, tmp_path / "again.ffr")
    assert (tmp_path / "p.ffr").read_bytes() == (tmp_path / "again.ffr").read_bytes()


@pytest.mark.parametrize("protocol", range(6))
def test_trees_pickled_by_any_python_are_read(tmp_path: Path, protocol: int) -> None:
    tree = OrderedDict({"a": 0, "d": OrderedDict({"b": 1})})
    path = with_tree(tmp_path / "p.ffr", 2, pickle.dumps(tree, protocol))
    assert PackedFolder(path).list(recursive=True) == ["a", "d", "d/b"]


def test_listing(folder: Path, tmp_path: Path) -> None:
    pack_folder(folder, tmp_path / "p.ffr")
    packed = open_folder(tmp_path / "p.ffr")
    assert packed.list() == ["Z", "a", "b.txt", "c d", "empty"]
    assert packed.list("a") == ["deep", "x", "x.bin"]
    assert packed.list("a", list_file=False, recursive=True) == ["deep", "deep/er"]
    assert packed.list("a", recursive=True) == ["deep", "deep/er", "deep/er/z", "x", "x.bin"]
    assert packed.list("empty") == []


def test_questions_about_names(folder: Path, tmp_path: Path) -> None:
    pack_folder(folder, tmp_path / "p.ffr")
    packed = open_folder(tmp_path / "p.ffr")
    answers = {
        name: (packed.exists(name), packed.is_file(name), packed.is_dir(name))
        for name in ("a/x", "a", "", "nothing", "a/x/below", "a/../a", "/a")
    }
    assert answers == {
        "a/x": (True, True, False),
        "a": (True, False, True),
        "": (True, False, True),
        "nothing": (False, False, False),
        "a/x/below": (False, False, False),
        "a/../a": (False, False, False),
        "/a": (False, False, False),
    }
    for name in ("nothing", "a", "a/x/below"):
        with pytest.raises(StorageError, match=f"has no file '{name}'"):
            packed.read(["a/x", name])
    for name in ("nothing", "a/x"):
        with pytest.raises(StorageError, match=f"has no directory '{name}'"):
            packed.list(name)


def test_links_are_followed_and_a_loop_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "link").symlink_to(folder / "b.txt")
    (folder / "twice").symlink_to(folder / "c d")
    pack_folder(folder, tmp_path / "p.ffr")
    packed = open_folder(tmp_path / "p.ffr")
    assert packed.read_one("link").tobytes() == b"bee"
    assert packed.read_one("twice/é").tobytes() == b"accent"
    (folder / "a" / "loop").symlink_to(folder)
    with pytest.raises(ConfigError, match="link to an enclosing directory"):
        pack_folder(folder, tmp_path / "q.ffr")
    assert not (tmp_path / "q.ffr").exists()


def test_what_cannot_be_packed_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a directory"):
        pack_folder(folder / "b.txt", tmp_path / "p.ffr")
    with pytest.raises(ConfigError, match="does not end in"):
        pack_folder(folder, tmp_path / "p.bin")
    os.mkfifo(folder / "a" / "fifo")
    with pytest.raises(ConfigError, match="a/fifo': it is neither a file nor a directory"):
        pack_folder(folder, tmp_path / "p.ffr")
    assert os.listdir(tmp_path) == ["folder"]


def test_a_file_that_goes_away_while_packing_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes

    def vanish(path: Path) -> bytes:
        if path.name == "b.txt":
            path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", vanish)
    with pytest.raises(StorageError, match=r"cannot pack folder .*b\.txt.*nothing was written"):
        pack_folder(folder, tmp_path / "p.ffr")
    assert os.listdir(tmp_path) == ["folder"]


def test_verbose_tells_each_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack_folder(folder, tmp_path / "p.ffr", verbose=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(FILES)
    assert lines[0] == f"1/6 {folder / 'Z'}"


def test_a_plain_record_file_is_not_a_packed_folder(tmp_path: Path) -> None:
    for samples in ([], [b"x"], [MAGIC[:-1]]):
        with FileWriter(tmp_path / "p.ffr", len(samples)) as writer:
            for sample in samples:
                writer.write_one(sample)
        with pytest.raises(ConfigError, match="not a packed folder"):
            PackedFolder(tmp_path / "p.ffr")


def _recursive() -> bytes:
    tree: Any = OrderedDict()
    tree["self"] = tree
    return pickle.dumps(tree)


def _shared() -> bytes:
    """2 ** 60 directories in some hundred bytes."""
    tree: Any = OrderedDict()
    for _ in range(60):
        tree = OrderedDict({"a": tree, "b": tree})
    return pickle.dumps(tree)


def _deep() -> bytes:
    tree: Any = OrderedDict()
    for _ in range(300):
        tree = OrderedDict({"a": tree})
    return pickle.dumps(tree)


class _Runs:
    """Runs a command when it is unpickled freely."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    "tree",
    [
        pickle.dumps(_Runs()),
        pickle.dumps(OrderedDict({"a": _Runs()})),
        pickle.dumps(OrderedDict({"a": np.int64(0)})),
        pickle.dumps({"a": 0}),
        pickle.dumps(0),
        pickle.dumps(None),
        pickle.dumps(OrderedDict({"a": True})),
        pickle.dumps(OrderedDict({"a": -1})),
        pickle.dumps(OrderedDict({"a": 1})),
        pickle.dumps(OrderedDict({"a": 2**70})),
        pickle.dumps(OrderedDict({"a": 0.0})),
        pickle.dumps(OrderedDict({0: 0})),
        *(pickle.dumps(OrderedDict({name: 0})) for name in ("", ".", "..", "/etc", "a/b", "a\0")),
        b"",
        b"garbage",
        pickle.dumps(OrderedDict({"a": 0}))[:-5],
        _recursive(),
        _shared(),
        _deep(),
    ],
    ids=lambda tree: repr(tree[:24]),
)
def test_a_tree_that_is_no_tree_of_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    path = with_tree(tmp_path / "p.ffr", 1, tree)
    with pytest.raises(Corrupted, match="tree of names is invalid"):
        PackedFolder(path)
    assert os.listdir(tmp_path) == ["p.ffr"]


@pytest.mark.parametrize("remember", [b"r" + b"\xff" * 4, b"p4294967295\n", b"p%d\n" % 2**62])
def test_a_number_in_the_tree_takes_no_memory(tmp_path: Path, remember: bytes) -> None:
    """pickle's own reader fills an array up to the place in the memo: 64 GiB and more."""
    tree = pickle.dumps(OrderedDict(a=0), 2)
    path = with_tree(tmp_path / "p.ffr", 1, tree[:-1] + remember + b".")
    tracemalloc.start()
    try:
        assert PackedFolder(path).list() == ["a"]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


CLASS = b"ccollections\nOrderedDict\n"
A = b"X\x01\0\0\0a"


@pytest.mark.parametrize(
    "tree",
    [
        CLASS + b".",
        CLASS + b")R)R.",
        CLASS + b")R0.",
        b"cos\nsystem\n)R.",
        CLASS + b"(" + A + b"tR.",
        CLASS + b")R" + A + b"s.",
        CLASS + b")R(" + A + b"u.",
        CLASS + b")R" + A + b"K\0s" + A + b"K\0s.",
        CLASS + b")R" + A + CLASS + b")R.",
        CLASS + b")Rq\0" + A + b"h\0s.",
        CLASS + b")R" + A + b")s.",
        CLASS + b")R" + A + b"h\7s.",
        CLASS + b")RV\\u00\nK\0s.",
        CLASS + b")RX\x01\0\0\0\xffK\0s.",
        CLASS + b")R" + A + b"I0x\ns.",
        b"\x8d" + b"\xff" * 8,
        b"u.",
        b"(.",
        b"s.",
        b"R.",
        b"t.",
        b"\x93.",
        b".",
    ],
    ids=repr,
)
def test_a_pickle_that_no_folder_has_is_refused(tree: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_names(tree, 1)


def test_names_that_are_not_utf8_come_back() -> None:
    name = os.fsdecode(b"\xff\xe9")
    for protocol in range(6):
        tree = pickle.dumps(OrderedDict({name: 0, "x" * 70_000: OrderedDict()}), protocol)
        assert list(read_names(tree, 1)) == [name, "x" * 70_000]


GOOD = pickle.dumps(OrderedDict({"a": 0, "d": OrderedDict({"b": 1, "c": 2})}), 4)


@settings(max_examples=cases(400), deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4))
def test_a_damaged_tree_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    tree = bytearray(GOOD)
    for position, value in changes:
        tree[position] = value
    path = with_tree(tmp_path_factory.getbasetemp() / "damaged.ffr", 3, bytes(tree))
    try:
        packed = PackedFolder(path)
    except Corrupted:
        return
    names = packed.list(list_dir=False, recursive=True)
    assert {s.tobytes() for s in packed.read(names)} <= {b"content"}
