"""Every format is read as what it holds, and refused in one typed error where it is damaged."""

import bz2
import gzip
import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from fireflyer.errors import ConfigError, Corrupted, FireflyerError, StorageError
from fireflyer.ffrecord import pack_folder
from fireflyer.ffrecord.convert.detect import kind_of_path, open_source
from fireflyer.ffrecord.convert.formats.mds import MdsSource
from fireflyer.ffrecord.convert.source import Column, Row, Selected, ahead


def rows_of(path: Path | str, kind: str | None = None, jobs: int = 1) -> list[Row]:
    return list(open_source([str(path)], kind).rows(jobs))


def plain(row: Row) -> dict[str, Any]:
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in row.items()}


def make_mds(folder: Path, rows: list[tuple[bytes, int]], **changes: Any) -> Path:
    """A shard of the columns {label: int64, text: str}, by the documented layout."""
    folder.mkdir(exist_ok=True)
    bodies = [struct.pack("<I", len(t)) + struct.pack("<q", n) + t for t, n in rows]
    place = 4 * (len(rows) + 2) + 2
    starts = [place]
    for body in bodies:
        starts.append(starts[-1] + len(body))
    head = struct.pack(f"<{len(rows) + 2}I", len(rows), *starts)
    (folder / "shard.00000.mds").write_bytes(head + b"{}" + b"".join(bodies))
    shard = {
        "column_names": ["label", "text"], "column_encodings": ["int64", "str"],
        "column_sizes": [8, None], "samples": len(rows), "format": "mds", "version": 2,
        "raw_data": {"basename": "shard.00000.mds", "bytes": 0, "hashes": {}}, "compression": None,
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard | changes]}))
    return folder


@pytest.mark.parametrize("jobs", [1, 3])
def test_class_folders_give_labels_in_sorted_order(tmp_path: Path, jobs: int) -> None:
    for name in ("dog/b.jpg", "cat/z.jpg", "cat/deep/a.png", "cat/.hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    assert [plain(row) for row in rows_of(tmp_path, jobs=jobs)] == [
        {"image": b"cat/z.jpg", "label": 0, "class": "cat", "name": "cat/z.jpg"},
        {"image": b"cat/deep/a.png", "label": 0, "class": "cat", "name": "cat/deep/a.png"},
        {"image": b"dog/b.jpg", "label": 1, "class": "dog", "name": "dog/b.jpg"},
    ]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1")
    assert rows_of(tmp_path) == [{"data": b"1", "name": "a.bin"}]


def test_links_to_class_folders_are_followed_but_not_around(tmp_path: Path) -> None:
    for name in ("in/a/1", "real/2"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "in" / "b").symlink_to("../real")
    found = [(row["name"], row["data"]) for row in rows_of(tmp_path / "in")]
    assert found == [("a/1", b"in/a/1"), ("b/2", b"real/2")]
    (tmp_path / "real" / "up").symlink_to("../in")
    with pytest.raises(ConfigError, match="link to an enclosing directory"):
        rows_of(tmp_path / "in")


def test_what_is_neither_file_nor_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "1").write_bytes(b"")
    for kind in ("FIFO", "socket", "broken link"):
        path = tmp_path / "in" / "a" / "2.txt"
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(path))
        else:
            path.symlink_to("nowhere")
        with pytest.raises(ConfigError, match="neither a file nor a directory"):
            rows_of(tmp_path / "in")
        if kind != "broken link":
            with pytest.raises(ConfigError, match="not a file or folder"):
                rows_of(path)
        path.unlink()


def test_files_beside_class_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"")
    with pytest.raises(ConfigError, match="outside the class folders"):
        open_source([str(tmp_path)])


def test_mds(tmp_path: Path) -> None:
    folder = make_mds(tmp_path / "m", [(b"one", 1), (b"", -2), ("drei ä".encode(), 3)])
    assert kind_of_path(str(folder)) == "mds"
    assert [plain(row) for row in rows_of(folder)] == [
        {"label": 1, "text": "one"}, {"label": -2, "text": ""}, {"label": 3, "text": "drei ä"},
    ]  # fmt: skip


def test_mds_arrays_of_all_four_kinds(tmp_path: Path) -> None:
    data = np.arange(6, dtype=np.int16).reshape(2, 3)
    coded = {
        "ndarray:int16:2,3": data.tobytes(),
        "ndarray:int16": bytes([2 << 2, 2, 3]) + data.tobytes(),
        "ndarray": bytes([17, 2 << 2 | 1]) + struct.pack("<2H", 2, 3) + data.tobytes(),
        "ndarray::2,3": bytes([17]) + data.tobytes(),
    }
    for encoding, body in coded.items():
        size = len(body) if encoding.count(":") == 2 and "::" not in encoding else None
        folder = make_mds(
            tmp_path / "m", [(b"", 0)],
            column_names=["a"], column_encodings=[encoding], column_sizes=[size],
        )  # fmt: skip
        sample = body if size else struct.pack("<I", len(body)) + body
        head = struct.pack("<3I", 1, 12, 12 + len(sample))
        (folder / "shard.00000.mds").write_bytes(head + sample)
        (row,) = rows_of(folder)
        np.testing.assert_array_equal(row["a"], data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column_encodings": ["pkl", "str"]}, "unsupported column encoding 'pkl'"),
        ({"raw_data": {"basename": "../secret"}}, "invalid shard name"),
        ({"samples": 3}, "does not hold the 3 samples"),
        ({"samples": -1}, "invalid shard name"),
        ({"format": "csv"}, "not of the format mds"),
        ({"column_sizes": [8]}, "not of the format mds"),
        ({"column_sizes": [16, None]}, "damaged"),
        ({"column_sizes": [-8, None]}, "damaged"),
        ({"compression": "zstd", "raw_data": {"basename": "gone.mds"}}, "names no compressed file"),
        ({"compression": "zstd", "zip_data": {"basename": "../gone"}}, "invalid shard name"),
    ],
)
def test_mds_that_cannot_be_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, Corrupted), match=message):
        MdsSource(make_mds(tmp_path / "m", [(b"one", 1), (b"two", 2)], **changes))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstandard.ZstdCompressor().compress,
    "zstd:7": lambda data: zstandard.ZstdCompressor(7, write_content_size=False).compress(data),
    "gz": gzip.compress,
    "gz:9": gzip.compress,
    "bz2": bz2.compress,
}


def make_compressed_mds(folder: Path, kind: str, data: bytes | None = None) -> Path:
    """The shard of `make_mds` compressed alone; or `data` in its place."""
    rows = [(b"one", 1), (b"two" * 100, 2)]
    whole = (make_mds(folder, rows) / "shard.00000.mds").read_bytes()
    (folder / "shard.00000.mds").unlink()
    name = f"shard.00000.mds.{kind.partition(':')[0]}"
    sizes = {
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(whole), "hashes": {}},
        "zip_data": {"basename": name, "bytes": 0, "hashes": {}},
    }
    make_mds(folder, rows, compression=kind, **sizes)
    (folder / "shard.00000.mds").unlink()
    (folder / name).write_bytes(COMPRESSORS[kind](whole) if data is None else data)
    return folder


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_compressed_mds(tmp_path: Path, kind: str) -> None:
    folder = make_compressed_mds(tmp_path / "m", kind)
    assert kind_of_path(str(folder)) == "mds"
    assert [plain(row)["text"] for row in rows_of(folder)] == ["one", "two" * 100]
    packed = next(folder.glob("*.mds.*"))
    good = packed.read_bytes()
    for bad in (b"", b"nonsense", good[:-9], COMPRESSORS[kind](bytes(1 << 20))):
        packed.write_bytes(bad)
        with pytest.raises(Corrupted, match=r"shard\.00000\.mds\."):
            rows_of(folder)


def test_compressions_that_are_not_read_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="invalid compression 'lz4': expected one of br, bz2"):
        MdsSource(make_compressed_mds(tmp_path / "m", "lz4", b""))
    monkeypatch.setitem(sys.modules, "snappy", None)
    with pytest.raises(ConfigError, match="pip install python-snappy"):
        MdsSource(make_compressed_mds(tmp_path / "n", "snappy", b""))


def test_every_cut_of_a_shard_is_an_error(tmp_path: Path) -> None:
    folder = make_mds(tmp_path / "m", [(b"one", 1), (b"two", 2)])
    shard = folder / "shard.00000.mds"
    whole = shard.read_bytes()
    for cut in range(len(whole)):
        shard.write_bytes(whole[:cut])
        with pytest.raises(Corrupted):
            rows_of(folder)


def test_text_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("eins\r\n\nzwei ä".encode())
    source = open_source([str(path)])
    assert source.length == 3
    assert [row["text"] for row in source.rows()] == ["eins", "", "zwei ä"]
    path.write_bytes(b"ok\n\xff\n")
    with pytest.raises(Corrupted, match="line 2: not UTF-8"):
        rows_of(path)


def test_json_lines_become_typed_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        {"i": 1, "f": 1, "s": "a", "v": [1, 2], "o": {"k": 1}, "mixed": 1, "b": True, "part": 1},
        {"i": 2, "f": 0.5, "s": "b", "v": [3], "o": None, "mixed": "x", "b": False},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    source = open_source([str(path)])
    assert {c.name: c.text for c in source.columns} == {
        "i": "int64", "f": "float64", "s": "str", "v": "int64[?]", "o": "str", "mixed": "str",
        "b": "bool", "part": "str",
    }  # fmt: skip
    assert [plain(row) for row in source.rows()] == [
        {"i": 1, "f": 1.0, "s": "a", "v": [1, 2], "o": '{"k":1}', "mixed": "1", "b": True, "part": "1"},
        {"i": 2, "f": 0.5, "s": "b", "v": [3], "o": "null", "mixed": '"x"', "b": False, "part": "null"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([(1 << 53) + 1, 0.5], "str"),
        ([0.5, 1 << 60], "str"),
        ([1 << 53, 0.5], "float64"),
        ([(1 << 53) + 1, 1], "int64"),
        ([[1, 0.5], [(1 << 53) + 1, 1]], "str"),
        ([[(1 << 53) + 1, 0.5]], "str"),
        ([[(1 << 63) + 1, -1]], "str"),
        ([[(1 << 53) + 1], [1]], "int64[?]"),
        ([[[1.5]], [[1e300, 1]]], "float64[?, ?]"),
    ],
)
def test_no_number_of_json_is_rounded(tmp_path: Path, values: list[Any], kind: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"a": value}) for value in values))
    source = open_source([str(path)])
    assert source.columns[0].text == kind
    found = [plain(row)["a"] for row in source.rows()]
    assert [json.loads(v) if kind == "str" else v for v in found] == values


@pytest.mark.parametrize("line", ["[1]", "{", '{"a":1}x', "{" + '"a":[' * 5000, "\ufffe"])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(Corrupted, match="line 2: not a JSON object"):
        open_source([str(path)])


def test_numpy_files(tmp_path: Path) -> None:
    x, y = np.arange(6, dtype=">f4").reshape(3, 2), np.array([1, 2, 3])
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "xy.npz", x=x, y=y)
    (tmp_path / "both").mkdir()
    np.save(tmp_path / "both" / "x.npy", x)
    np.save(tmp_path / "both" / "y.npy", y)
    assert [row["data"].tolist() for row in rows_of(tmp_path / "x.npy")] == x.tolist()
    for path in (tmp_path / "xy.npz", tmp_path / "both"):
        source = open_source([str(path)])
        assert source.columns == (Column("x", "float32", (2,)), Column("y", "int64"))
        assert [plain(row) for row in source.rows()] == [
            {"x": a, "y": b} for a, b in zip(x.tolist(), y.tolist(), strict=True)
        ]


def test_numpy_files_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(Corrupted, match="not an array of numbers"):
        open_source([str(path)])
    np.save(path, np.array(3))
    with pytest.raises(ConfigError, match="first axis"):
        open_source([str(path)])
    np.save(path, np.zeros((4, 2)))
    whole = path.read_bytes()
    for cut in (0, 1, 6, 9, 60, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(FireflyerError):
            open_source([str(path)])


TEXTS = [{"text": "a", "n": 1}, {"text": "b", "n": 2}]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder."""
    (tmp_path / "my_sets.py").write_text(
        "import numpy as np\n"
        "class Items:\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, i): return np.full((i, 2), i, np.float32), i, f't{i}', b'raw'\n"
        "texts = [{'text': 'a', 'n': 1}, {'text': 'b', 'n': 2}]\n"
        "odd = [{'a': 1}, {'b': 1}]\n"
        "drift = [{'a': 1}, {'a': 'x'}]\n"
        "def lines(): yield from ['x', 'y']\n"
        "number = 3\n"
        "class Fails(Items):\n"
        "    def __getitem__(self, i): return {}[i] if i == 2 else i\n"
        "def broken():\n"
        "    yield 1\n"
        "    raise RuntimeError('two\\nlines')\n"
        "def refuses(): raise OSError('no')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_sets", raising=False)
    return "my_sets"


@pytest.mark.parametrize("jobs", [1, 2])
def test_data_sets_of_python(module: str, jobs: int) -> None:
    source = open_source([f"{module}:Items"])
    assert [c.text for c in source.columns] == ["float32[?, ?]", "int64", "str", "bytes"]
    assert [row["item0"].shape for row in source.rows(jobs)] == [(0, 2), (1, 2), (2, 2)]
    assert [plain(row) for row in rows_of(f"{module}:texts")] == TEXTS
    assert rows_of(f"{module}:lines") == [{"data": "x"}, {"data": "y"}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "not a data set"),
        ("nothing", "nothing"),
        ("odd", "item 1 has columns b"),
        ("drift", "item 1: column 'a' is int64, this value is str"),
        ("Fails", "my_sets:Fails, item 2: KeyError: 2"),
        ("broken", "my_sets:broken, item 1: RuntimeError: two"),
        ("refuses", "my_sets:refuses: OSError: no"),
    ],
)
def test_what_is_no_data_set(module: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_of(f"{module}:{name}")


def test_torch_tensors_become_arrays(module: str, tmp_path: Path) -> None:
    (tmp_path / "with_torch.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "data = TensorDataset(torch.arange(6.).reshape(3, 2), torch.tensor([1, 0, 1]))\n"
    )
    found = [plain(row) for row in rows_of("with_torch:data")]
    assert found[1] == {"item0": [2.0, 3.0], "item1": 0}


def test_parquet_without_pyarrow_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="needs pyarrow, which is not installed: pip install"):
        open_source([str(tmp_path / "a.parquet")])


def test_a_packed_folder_is_rows_with_names(tmp_path: Path) -> None:
    (tmp_path / "in" / "d").mkdir(parents=True)
    (tmp_path / "in" / "d" / "b").write_bytes(b"2")
    (tmp_path / "in" / "z").write_bytes(b"1")
    pack_folder(tmp_path / "in", tmp_path / "p.ffr")
    rows = [(bytes(row["data"]), row["name"]) for row in rows_of(tmp_path / "p.ffr")]
    assert rows == [(b"2", "d/b"), (b"1", "z")]


def test_several_sources_of_the_same_columns_are_one(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name}1\n{name}2\n")
    source = open_source([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    assert source.length == 4
    assert [row["text"] for row in source.rows()] == ["a1", "a2", "b1", "b2"]
    np.save(tmp_path / "c.npy", np.zeros(2))
    with pytest.raises(ConfigError, match="pack them separately"):
        open_source([str(tmp_path / "a.txt"), str(tmp_path / "c.npy")])


def test_columns_are_chosen_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(2), y=np.arange(2))
    source = open_source([str(tmp_path / "a.npz")])
    assert [plain(row) for row in Selected(source, ["y"]).rows()] == [{"y": 0}, {"y": 1}]
    with pytest.raises(ConfigError, match="no column 'z'"):
        Selected(source, ["z"])


def test_nothing_is_read_far_ahead_and_an_error_comes_in_its_place() -> None:
    loaded: list[int] = []

    def load(index: int) -> Row:
        loaded.append(index)
        if index == 5:
            raise StorageError("five")
        return {"i": index}

    rows = ahead(load, 1000, 2)
    assert [next(rows)["i"] for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(StorageError, match="five"):
        next(rows)
    assert max(loaded) < 20


@pytest.mark.parametrize("path", ["nothing.tar", "a.weird"])
def test_paths_that_tell_nothing(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.weird").write_bytes(b"")
    with pytest.raises(ConfigError):
        open_source([path])
