"""Columns that may hold None, and columns of nested values."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord import FileReader, FileWriter, RemoteFiles
from fireflyer.ffrecord.columns import Column

Encode = Callable[..., bytes]
COLUMNS: dict[str, Any] = {
    "n": "int32?",
    "v": ("float32?", (None, 2)),
    "text": "str?",
    "raw": "bytes?",
    "nested": "msgpack",
    "label": "int64",
}
ROWS: list[dict[str, Any]] = [
    {
        "n": 7,
        "v": [[1, 2]],
        "text": "ä",
        "raw": b"\0",
        "nested": [[1], [2, 2.5, None]],
        "label": 1,
    },
    {"n": None, "v": None, "text": None, "raw": None, "nested": None, "label": 2},
    {
        "n": 0,
        "v": np.zeros((0, 2)),
        "text": "",
        "raw": b"",
        "nested": {"a": [b"b", "c", True]},
        "label": 3,
    },
]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: v.tolist() if isinstance(v, np.ndarray | np.generic) else v for name, v in row.items()
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with FileWriter(tmp_path / "a.ffr", columns=COLUMNS) as writer:
        for row in ROWS:
            writer.write_row(row)
    return tmp_path / "a.ffr"


def test_rows_come_back_with_their_nones(path: Path) -> None:
    for reader in (FileReader(path), RemoteFiles(f"file://{path}")):
        assert reader.columns is not None
        assert reader.columns["n"] == Column("int32", (), True)
        found = reader.rows([2, 1, 0])
        assert [plain(row) for row in found] == [plain(row) for row in ROWS[::-1]]
        assert found[2]["n"].dtype == np.int32
        batch = reader.read_columns([0, 1])
        assert batch["label"].tolist() == [1, 2]
        assert batch["n"] == [np.int32(7), None]


def test_the_bytes_are_those_of_the_page(tmp_path: Path, encode_v2: Encode) -> None:
    """Ahead of the sizes of a nullable column a u64: 1, or 0 for None, which has no data."""
    schema = {
        "columns": [
            {"name": "n", "dtype": "int32?", "shape": []},
            {"name": "v", "dtype": "float32?", "shape": [None, 2]},
            {"name": "nested", "dtype": "msgpack", "shape": []},
        ]
    }
    nested = b"\x92\x01\xc0"
    there = struct.pack("<4QiI2f3s5x", 1, 1, 1, 3, -5, 0, 1.5, 2.5, nested)
    none = struct.pack("<4Q3s5x", 0, 0, 0, 3, nested)
    path = tmp_path / "a.ffr"
    path.write_bytes(encode_v2([[there, none]], schema=json.dumps(schema).encode()))
    with FileReader(path) as reader:
        assert [plain(row) for row in reader.rows([0, 1])] == [
            {"n": -5, "v": [[1.5, 2.5]], "nested": [1, None]},
            {"n": None, "v": None, "nested": [1, None]},
        ]
    columns: dict[str, Any] = {"n": "int32?", "v": ("float32?", (None, 2)), "nested": "msgpack"}
    with FileWriter(tmp_path / "b.ffr", columns=columns) as writer:
        writer.write_row({"n": -5, "v": np.array([[1.5, 2.5]], "f4"), "nested": [1, None]})
    with FileReader(tmp_path / "b.ffr") as reader:
        assert reader.read_one(0).tobytes() == there


@pytest.mark.parametrize(
    ("flag", "size", "body", "match"),
    [
        (2, 1, b"\xc0", "invalid presence flag"),
        (0, 1, b"\xc0", "is None, but has a size"),
        (1, 1, b"\xc1", "not valid MessagePack"),
        (1, 1, b"\x91", "not valid MessagePack"),
        (1, 8, b"\x91" * 8, "not valid MessagePack"),
        (1, 2, b"\xa1\xff", "not valid MessagePack"),
    ],
)
def test_damaged_rows_are_told(
    tmp_path: Path, encode_v2: Encode, flag: int, size: int, body: bytes, match: str
) -> None:
    columns = [
        {"name": "t", "dtype": "str?", "shape": []},
        {"name": "m", "dtype": "msgpack", "shape": []},
    ]
    row = struct.pack("<3Q", flag, size if flag == 0 else 0, size) + body.ljust(8, b"\0")
    path = tmp_path / "a.ffr"
    path.write_bytes(encode_v2([[row]], schema=json.dumps({"columns": columns}).encode()))
    with FileReader(path) as reader, pytest.raises(Corrupted, match=match):
        reader.rows([0])


def test_nesting_has_a_bound_both_ways(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with FileWriter(tmp_path / "a.ffr", columns={"m": "msgpack"}) as writer:
        with pytest.raises(TypeError, match="column 'm'"):
            writer.write_row({"m": deep})
        for bad, error in (
            (object(), TypeError),
            (np.array([1j]), TypeError),
            (1 << 64, ValueError),
        ):
            with pytest.raises(error, match="column 'm'"):
                writer.write_row({"m": bad})
        writer.write_row({"m": [np.arange(2), np.float32(0.5)]})
    assert FileReader(tmp_path / "a.ffr").rows([0]) == [{"m": [[0, 1], 0.5]}]


def test_none_is_refused_where_the_column_does_not_take_it(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr", columns={"n": "int64"}) as writer:
        with pytest.raises(TypeError, match="column 'n'"):
            writer.write_row({"n": None})
        writer.write_row({"n": 1})
    for bad in ("msgpack?", "int64??", "?", ("msgpack", (2,))):
        with pytest.raises(ConfigError, match="column 'n'"):
            FileWriter(tmp_path / "b.ffr", columns={"n": bad})
