"""Rows of typed columns, and compressed samples."""

import json
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.draws import cases

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord import FileReader, FileWriter
from fireflyer.ffrecord.columns import Column, RowCodec, columns_of
from fireflyer.ffrecord.output import bytes_of

Encode = Callable[..., bytes]
COLUMNS: dict[str, Any] = {
    "image": ("uint8", (None, None, 3)),
    "label": "int64",
    "text": "str",
    "box": ("float32", [2, 2]),
    "raw": "bytes",
}
SCHEMA = {
    "columns": [
        {"name": "image", "dtype": "uint8", "shape": [None, None, 3]},
        {"name": "label", "dtype": "int64", "shape": []},
        {"name": "text", "dtype": "str", "shape": []},
        {"name": "box", "dtype": "float32", "shape": [2, 2]},
        {"name": "raw", "dtype": "bytes", "shape": []},
    ]
}


def row(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "image": random.integers(0, 256, (seed % 5, 7, 3), np.uint8),
        "label": seed - 3,
        "text": "wörter " * seed,
        "box": random.random((2, 2), np.float32),
        "raw": random.bytes(seed),
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(found[name], value) for name, value in expected.items()
    )


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_rows_come_back(tmp_path: Path, compression: str | None) -> None:
    path = tmp_path / "a.ffr"
    with FileWriter(path, columns=COLUMNS, compression=compression) as writer:
        for i in range(10):
            writer.write_row(row(i))
    with FileWriter.append(path, compression=compression) as writer:
        assert writer.columns == columns_of(COLUMNS)
        for i in range(10, 20):
            writer.write_row(row(i))
    reader = FileReader(path)
    assert reader.columns == {
        "image": Column("uint8", (None, None, 3)),
        "label": Column("int64", ()),
        "text": Column("str", ()),
        "box": Column("float32", (2, 2)),
        "raw": Column("bytes", ()),
    }
    order = [7, 3, 19, 7]
    found = reader.rows(order)
    assert all(same(a, row(i)) for a, i in zip(found, order, strict=True))
    assert all(r[name].flags.aligned for r in found for name in ("image", "box", "label"))
    found[0]["image"][...] = 1
    assert same(found[3], row(7))
    batch = reader.read_columns(order)
    assert batch["label"].tolist() == [i - 3 for i in order]
    assert batch["box"].shape == (4, 2, 2)
    assert np.array_equal(batch["box"][1], row(3)["box"])
    assert batch["text"] == ["wörter " * i for i in order]
    assert [a.shape for a in batch["image"]] == [(i % 5, 7, 3) for i in order]
    assert reader.read_columns([])["box"].shape == (0, 2, 2)


def test_the_bytes_of_schema_and_row(tmp_path: Path, encode_v2: Encode) -> None:
    with FileWriter(tmp_path / "a.ffr", columns=COLUMNS) as writer:
        writer.write_row(row(4))
    value = row(4)
    text = value["text"].encode()
    sizes = struct.pack("<QQQQ", 4, 7, len(text), 4)
    data = [
        value["image"].tobytes(),
        struct.pack("<q", 1),
        text,
        value["box"].tobytes(),
        value["raw"],
    ]
    expected = sizes + b"".join(part + bytes(-len(part) % 8) for part in data)
    file = (tmp_path / "a.ffr").read_bytes()
    length = struct.unpack_from("<Q", file, 24)[0]
    schema = file[4096 : 4096 + length]
    assert json.loads(schema) == SCHEMA
    assert file == encode_v2([[expected]], schema=schema)
    assert FileReader(tmp_path / "a.ffr").read_one(0).tobytes() == expected


@settings(max_examples=cases(150), deadline=None)
@given(
    hnp.arrays(
        st.sampled_from(["?", "i1", "<i8", "<u2", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.data(),
)
def test_any_array_survives(array: np.ndarray[Any, Any], text: str, data: Any) -> None:
    shape = [size if data.draw(st.booleans()) else None for size in array.shape]
    codec = RowCodec(columns_of({"t": "str", "a": (array.dtype.name, shape), "b": "bytes"}))
    value = {"t": text, "a": array, "b": text.encode()}
    encoded = b"".join(bytes(bytes_of(p)) for p in codec.encode(value))
    found = codec.decode(np.frombuffer(encoded, np.uint8))
    assert (found["t"], found["b"]) == (text, text.encode())
    assert (found["a"].dtype, found["a"].shape) == (array.dtype, array.shape)
    assert found["a"].tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("change", "error", "what"),
    [
        ({"label": 1.5}, ValueError, "cannot hold float64"),
        ({"label": 2**63}, ValueError, "cannot hold uint64"),
        ({"label": [1]}, ValueError, r"has the shape \(\), not \(1,\)"),
        ({"label": "1"}, TypeError, "needs int64"),
        ({"label": None}, TypeError, "needs int64"),
        ({"image": np.zeros((2, 2, 4), np.uint8)}, ValueError, "has the shape"),
        ({"image": np.full((1, 1, 3), 256)}, ValueError, "cannot hold int64"),
        ({"image": np.full((1, 1, 3), -1)}, ValueError, "cannot hold int64"),
        ({"box": np.zeros((2, 2), complex)}, ValueError, "cannot hold complex128"),
        ({"text": b"text"}, TypeError, "needs str"),
        ({"text": "\ud800"}, ValueError, "surrogates"),
        ({"raw": "text"}, TypeError, "needs bytes"),
        ({"other": 1}, ValueError, "are not those of the file: other"),
    ],
)
def test_a_value_that_a_column_cannot_hold_is_refused_and_the_writer_goes_on(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], what: str
) -> None:
    with FileWriter(tmp_path / "a.ffr", columns=COLUMNS) as writer:
        with pytest.raises(error, match=what):
            writer.write_row(row(4) | change)
        writer.write_row(row(4))
    (found,) = FileReader(tmp_path / "a.ffr").rows([0])
    assert same(found, row(4))


def test_values_are_taken_as_numpy_takes_them(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr", columns={"a": ("float32", [2]), "b": "bool"}) as writer:
        writer.write_row({"a": [1, 0.1], "b": 1})
        writer.write_row({"a": np.arange(4.0)[::2], "b": np.bool_(False)})
        writer.write_row({"a": np.array([1, 2], ">f4"), "b": True})
    batch = FileReader(tmp_path / "a.ffr").read_columns([0, 1, 2])
    assert batch["a"].tolist() == [[1, np.float32(0.1)], [0, 2], [1, 2]]
    assert batch["b"].tolist() == [True, False, True]


@pytest.mark.parametrize(
    "columns",
    [
        {"a": "object"},
        {"a": "longdouble"},
        {"a": ">i4"},
        {"a": ("str", [3])},
        {"a": ("int8", [-1])},
        {"a": ("int8", [2**60])},
        {"a": ("int8", [0, 2**39, 2**39])},
        {"a": ("int8", [True])},
        {"": "int8"},
        {"a" * (1 << 20): "int8"},
    ],
    ids=range(10),
)
def test_columns_that_cannot_be_are_config_errors(tmp_path: Path, columns: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FileWriter(tmp_path / "a.ffr", columns=columns)
    assert list(tmp_path.iterdir()) == []


def test_rows_and_samples_are_not_mixed(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr", columns={"a": "int8"}) as writer:
        with pytest.raises(ConfigError, match="has columns: use write_row"):
            writer.write_one(b"")
        writer.write_row({"a": 1})
    with FileWriter(tmp_path / "b.ffr", version=2) as writer:
        with pytest.raises(ConfigError, match="has no columns: use write_one"):
            writer.write_row({"a": 1})
        writer.write_one(b"x")
    with pytest.raises(ConfigError, match="no columns: use read"):
        FileReader(tmp_path / "b.ffr").rows([0])
    with pytest.raises(ConfigError, match="different columns"):
        FileReader(tmp_path)


HOSTILE: list[tuple[dict[str, Any], bytes]] = [
    ({"a": "int64"}, b""),
    ({"a": "int64"}, bytes(7)),
    ({"a": "int64"}, bytes(16)),
    ({"a": "str"}, b""),
    ({"a": "str"}, struct.pack("<Q", 1)),
    ({"a": "str"}, struct.pack("<Q", 2**64 - 1) + bytes(8)),
    ({"a": "str"}, struct.pack("<Q", 2**64 - 8) + bytes(8)),
    ({"a": "str"}, struct.pack("<Q", 1) + b"\xff" + bytes(7)),
    ({"a": "str"}, struct.pack("<Q", 1) + b"a"),
    ({"a": "bytes", "b": "bytes"}, struct.pack("<QQ", 8, 2**64 - 8) + bytes(8)),
    ({"a": ("uint8", [None, None])}, struct.pack("<QQ", 2**32, 2**32)),
    ({"a": ("uint8", [None, None])}, struct.pack("<QQ", 2**63, 2) + bytes(8)),
    ({"a": ("int64", [None])}, struct.pack("<Q", 2**61) + bytes(8)),
    ({"a": ("int64", [None, None])}, struct.pack("<QQ", 2**64 - 1, 0)),
    ({"a": ("int64", [None, None, None])}, struct.pack("<QQQ", 2**62, 2**62, 0)),
]


@pytest.mark.parametrize(("columns", "data"), HOSTILE, ids=range(len(HOSTILE)))
def test_sizes_that_do_not_fit_the_bytes_are_damage(
    tmp_path: Path, encode_v2: Encode, columns: dict[str, Any], data: bytes
) -> None:
    entries = [
        {"name": name, "dtype": value, "shape": []}
        if isinstance(value, str)
        else {"name": name, "dtype": value[0], "shape": value[1]}
        for name, value in columns.items()
    ]
    schema = json.dumps({"columns": entries}).encode()
    (tmp_path / "a.ffr").write_bytes(encode_v2([[data]], schema=schema))
    reader = FileReader(tmp_path / "a.ffr")
    assert reader.read_one(0).tobytes() == data
    with pytest.raises(Corrupted, match=r"a\.ffr', sample 0 is damaged"):
        reader.rows([0])


@pytest.mark.parametrize(
    "schema",
    [
        b"{",
        b"\xff",
        b"[]",
        b"{}",
        b'{"columns": []}',
        b'{"columns": 1}',
        b'{"columns": [{"name": "a"}]}',
        b'{"columns": [{"name": "a", "dtype": "object", "shape": []}]}',
        b'{"columns": [{"name": ["a"], "dtype": "int8", "shape": []}]}',
        b'{"columns": [{"name": "a", "dtype": "int8", "shape": [-1]}]}',
        b'{"columns": [{"name": "a", "dtype": "int8", "shape": 1}]}',
        # One empty row can be read, but numpy cannot make an array of twenty.
        b'{"columns": [{"name": "a", "dtype": "int8", "shape": [0, 549755813888, 8388608]}]}',
        b'{"columns": [{"name": "a", "dtype": ["int8"], "shape": []}]}',
        b'{"columns": [' + b'{"name": "a", "dtype": "int8", "shape": []},' * 2 + b"{}]}",
        b"[" * 100_000,
    ],
    ids=range(15),
)
def test_a_schema_that_is_none_is_damage(tmp_path: Path, encode_v2: Encode, schema: bytes) -> None:
    (tmp_path / "a.ffr").write_bytes(encode_v2([[b""]], schema=schema))
    with pytest.raises(Corrupted, match=r"a\.ffr' is damaged"):
        FileReader(tmp_path / "a.ffr")
    with pytest.raises(Corrupted, match=r"a\.ffr' is damaged"):
        FileWriter.append(tmp_path / "a.ffr")


def test_a_schema_larger_than_a_page(tmp_path: Path) -> None:
    columns: dict[str, Any] = {f"column {i}": "int16" for i in range(300)}
    values = {name: i for i, name in enumerate(columns)}
    with FileWriter(tmp_path / "a.ffr", columns=columns) as writer:
        writer.write_row(values)
    with FileWriter.append(tmp_path / "a.ffr") as writer:
        writer.write_row(values)
    found = FileReader(tmp_path / "a.ffr").read_columns([0, 1])
    assert {name: int(v[1]) for name, v in found.items()} == values


MIXED = [b"", b"a" * 100_000, np.random.default_rng(0).bytes(5000), b"abc" * 2_000_000, b"x"]


def test_compressed_samples_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.ffr"
    with FileWriter(path, compression="zstd", level=1) as writer:
        for sample in MIXED:
            writer.write_one(sample)
    assert path.stat().st_size < 50_000
    with FileWriter.append(path) as writer:  # and plain ones behind them
        writer.write_one(MIXED[1])
    expected = [*MIXED, MIXED[1]]
    reader = FileReader(path)
    reader.validate()
    for order in ([1], [3, 3, 0, 5, 2, 1, 4], [0, 2], [1, 3] * 4):
        arena, offsets = reader.read_batch(order)
        assert arena.size == offsets[-1]
        found = reader.read(order)
        assert [s.tobytes() for s in found] == [expected[i] for i in order]
    found[0][:] = 0
    assert found[2].tobytes() == expected[1]


def frame_file(encode_v2: Encode, frame: bytes, raw: int) -> bytes:
    """A file with one sample, `frame`, of which the index says that it holds `raw` bytes."""
    file = bytearray(encode_v2([[frame]]))
    index = (12288 + len(frame) + 4095) // 4096 * 4096
    file[index + 48 : index + 56] = struct.pack("<Q", raw)
    file[index + 60 : index + 64] = struct.pack("<I", 1)
    file[index : index + 4] = struct.pack("<I", zlib.crc32(file[index + 4 : index + 4096]))
    return bytes(file)


FRAME = zstandard.ZstdCompressor().compress(b"a" * 1000)
NO_SIZE = zstandard.ZstdCompressor(write_content_size=False).compress(b"a" * 1000)
# Its header claims 2^40 bytes.
LIAR = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 40) + FRAME[7:]


@pytest.mark.parametrize(
    ("frame", "raw"),
    [
        (FRAME, 999),
        (FRAME, 1001),
        (FRAME[:-1], 1000),
        (FRAME + b"x", 1000),
        (FRAME + FRAME, 1000),
        (NO_SIZE, 1000),
        (LIAR, 1000),
        (b"no frame", 1000),
        (b"\x28\xb5\x2f\xfd" + b"\xff" * 30, 1000),
    ],
    ids=range(9),
)
def test_a_frame_that_does_not_hold_what_the_index_says_is_damage(
    tmp_path: Path, encode_v2: Encode, frame: bytes, raw: int
) -> None:
    path = tmp_path / "a.ffr"
    path.write_bytes(frame_file(encode_v2, FRAME, 1000))
    assert FileReader(path).read_one(0).tobytes() == b"a" * 1000
    path.write_bytes(frame_file(encode_v2, frame, raw))
    with pytest.raises(Corrupted, match=r"a\.ffr', sample 0 is damaged"):
        FileReader(path).read_one(0)


def test_without_the_package_only_compressed_samples_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ffr"
    with FileWriter(path, compression="zstd") as writer:
        for sample in MIXED:
            writer.write_one(sample)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    reader = FileReader(path)
    assert reader.read_one(2).tobytes() == MIXED[2]
    with pytest.raises(ConfigError, match=r"pip install 'fireflyer\[zstd\]'"):
        reader.read_one(1)
    with pytest.raises(ConfigError, match="need the package 'zstandard'"):
        FileWriter(tmp_path / "b.ffr", compression="zstd")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ffr"]
