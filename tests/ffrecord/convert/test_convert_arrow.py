"""Parquet, Arrow and saved data sets of Hugging Face: what is null stays null, there and back."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.ipc
import pyarrow.parquet as parquet
import pytest
from tests.conftest import fork_child
from tests.draws import cases, drawn

from fireflyer.cli.app import run_line
from fireflyer.errors import ConfigError, Corrupted, FireflyerError
from fireflyer.ffrecord import FileReader, FileWriter
from fireflyer.ffrecord.convert.detect import kind_of_path, open_source
from fireflyer.ffrecord.convert.source import Row


def plain(row: Row) -> dict[str, Any]:
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in row.items()}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [plain(row) for row in open_source([str(path)]).rows()]


def ran(*arguments: object, code: int = 0) -> None:
    assert run_line(["record", *map(str, arguments)]) == code


def save_stream(path: Path, table: Any, rows: int = 2) -> None:
    """An Arrow stream as Hugging Face's datasets writes it."""
    with arrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table, rows)


IMAGE = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
VALUES: dict[str, tuple[Any, list[Any], str]] = {
    "i": (arrow.int32(), [1, None, 3, 4], "int32?"),
    "b": (arrow.bool_(), [True, False, None, None], "bool?"),
    "s": (arrow.string(), ["a", None, "", "d"], "str?"),
    "full": (arrow.float32(), [0.5, 1.5, 2.5, 3.5], "float32"),
    "v": (arrow.list_(arrow.float32()), [[1.0], None, [], [2.0, 3.0]], "float32?[?]"),
    "fixed": (arrow.list_(arrow.int8(), 2), [[1, 2], None, [3, 4], [5, 6]], "int8?[2]"),
    "even": (
        arrow.list_(arrow.list_(arrow.int64())),
        [[[1, 2], [3, 4]], [], [[], []], [[5]]],
        "int64[?, ?]",
    ),
    "ragged": (
        arrow.list_(arrow.list_(arrow.int64())),
        [[[1, 2], [3]], None, [], [[4]]],
        "msgpack",
    ),
    "holes": (arrow.list_(arrow.int64()), [[1, None], [2], None, []], "msgpack"),
    "tags": (arrow.list_(arrow.string()), [["x", "y"], [], None, [None]], "msgpack"),
    "none": (arrow.null(), [None] * 4, "msgpack"),
    "boxes": (
        arrow.list_(arrow.struct([("x", arrow.int64()), ("of", arrow.list_(arrow.float64()))])),
        [[{"x": 1, "of": [0.5]}], [], [{"x": None, "of": []}], None],
        "msgpack",
    ),
}
TABLE = arrow.table({name: arrow.array(v, kind) for name, (kind, v, _) in VALUES.items()})
EXPECTED = TABLE.to_pylist()


@pytest.fixture(params=["parquet", "parquet without statistics", "arrow file", "arrow stream"])
def stored(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / ("a.parquet" if request.param.startswith("parquet") else "a.arrow")
    if path.suffix == ".parquet":
        statistics = request.param == "parquet"
        parquet.write_table(TABLE, path, row_group_size=2, write_statistics=statistics)
    elif request.param == "arrow file":
        with pyarrow.ipc.new_file(str(path), TABLE.schema) as out:
            out.write_table(TABLE, 3)
    else:
        save_stream(path, TABLE)
    return path


def test_nulls_and_uneven_lists_are_what_they_were(stored: Path, tmp_path: Path) -> None:
    source = open_source([str(stored)])
    assert {c.name: c.text for c in source.columns} == {
        n: told for n, (_, _, told) in VALUES.items()
    }
    assert rows_of(stored) == EXPECTED
    ran("pack", stored, "-o", tmp_path / "a.ffr")
    with FileReader(tmp_path / "a.ffr") as reader:
        assert [plain(row) for row in reader.rows(range(4))] == EXPECTED


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_damaged_files_are_read_or_refused(tmp_path: Path, suffix: str) -> None:
    """pyarrow alone ends the process over 2 of 100 such files: a process of its own tells."""
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        parquet.write_table(TABLE, path)
    else:
        save_stream(path, TABLE)
    good = path.read_bytes()
    random = drawn(f"damage to {suffix}")

    def read_all() -> None:
        refused = 0
        for _ in range(cases(400)):
            damaged = bytearray(good)
            damaged[random.randrange(len(good))] ^= 1 << random.randrange(8)
            path.write_bytes(damaged)
            try:
                rows_of(path)
            except FireflyerError:
                refused += 1
        assert refused

    ended = os.waitstatus_to_exitcode(os.waitpid(fork_child(read_all), 0)[1])
    assert ended == 0, f"reading {path} ended the process"


def test_there_and_back_by_parquet(tmp_path: Path) -> None:
    parquet.write_table(TABLE, tmp_path / "a.parquet")
    ran("pack", tmp_path / "a.parquet", "-o", tmp_path / "a.ffr")
    ran("convert", tmp_path / "a.ffr", "-o", tmp_path / "b.parquet")
    back = parquet.read_table(tmp_path / "b.parquet")
    assert back.to_pylist() == EXPECTED
    assert back.schema.equals(TABLE.schema)
    ran(
        "convert",
        tmp_path / "a.ffr",
        "-o",
        tmp_path / "c",
        "--to",
        "parquet",
        "--columns",
        "tags,i",
    )
    assert parquet.read_table(tmp_path / "c").column_names == ["tags", "i"]


def test_a_null_struct_has_null_fields(tmp_path: Path) -> None:
    images = arrow.array([{"bytes": b"x", "path": None}, None], IMAGE)
    for path in (tmp_path / "a.parquet", tmp_path / "a.arrow"):
        table = arrow.table({"image": images})
        if path.suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            save_stream(path, table)
        assert rows_of(path) == [
            {"image.bytes": b"x", "image.path": None},
            {"image.bytes": None, "image.path": None},
        ]


def test_shards_with_and_without_nulls_are_one(tmp_path: Path) -> None:
    shards: list[tuple[Any, Any]] = [([1, 2], [[1], [2]]), ([None, 4], [[3], [4, None]])]
    for number, (n, v) in enumerate(shards):
        table = arrow.table({"n": n, "v": arrow.array(v, arrow.list_(arrow.int64()))})
        parquet.write_table(table, tmp_path / f"{number}.parquet")
    paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    for sources, out in ((paths, "a.ffr"), (paths[::-1], "b.ffr")):
        ran("pack", *sources, "-o", tmp_path / out)
        with FileReader(tmp_path / out) as reader:
            rows = [plain(row) for row in reader.rows(range(4))]
        rows.sort(key=lambda row: row["v"][0])
        assert [row["n"] for row in rows] == [1, 2, None, 4]
        assert [row["v"] for row in rows] == [[1], [2], [3], [4, None]]


def test_bytes_that_may_be_none_are_no_v1(tmp_path: Path) -> None:
    parquet.write_table(arrow.table({"data": [b"a", None]}), tmp_path / "a.parquet")
    ran("pack", tmp_path / "a.parquet", "-o", tmp_path / "a.ffr")
    assert [row["data"] for row in FileReader(tmp_path / "a.ffr").rows([0, 1])] == [b"a", None]
    ran("pack", tmp_path / "a.parquet", "-o", tmp_path / "b.ffr", "--format", "v1", code=1)


def test_none_elsewhere(tmp_path: Path, capsysbinary: Any) -> None:
    """JSON has null; a tar and arrays of numpy have nothing; people see it."""
    table = arrow.table({"n": [1, None], "v": [[[1], [2, 3]], None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    ran("pack", tmp_path / "a.parquet", "-o", tmp_path / "a.ffr")
    ran("convert", tmp_path / "a.ffr", "-o", tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == table.to_pylist()
    capsysbinary.readouterr()
    ran("cat", tmp_path / "a.ffr", 1)
    assert json.loads(capsysbinary.readouterr().out) == {"n": None, "v": None}
    ran("cat", tmp_path / "a.ffr", 0, "--column", "v")
    assert capsysbinary.readouterr().out == b"[[1],[2,3]]"
    ran("ls", tmp_path / "a.ffr", "--html", tmp_path / "a.html")
    assert b"n: int64?, v: msgpack" in capsysbinary.readouterr().out
    assert "[[1], [2, 3]]" in (tmp_path / "a.html").read_text()
    ran("merge", tmp_path / "a.ffr", tmp_path / "a.ffr", "-o", tmp_path / "aa.ffr")
    assert FileReader(tmp_path / "aa.ffr").rows([3])[0] == {"n": None, "v": None}
    for out, told in (("a.tar", b"column 'n' is None"), ("a", b"'n' is int64?")):
        to = ["--to", "npy"] if out == "a" else []
        ran("convert", tmp_path / "a.ffr", "-o", tmp_path / out, *to, code=1)
        assert told in capsysbinary.readouterr().err
        assert not (tmp_path / out).exists()


def test_what_parquet_cannot_hold_is_refused(tmp_path: Path, capsysbinary: Any) -> None:
    cases: list[tuple[str, list[Any], str]] = [
        ("complex64", [1j], "complex64, which Parquet does not support"),
        ("msgpack", [[1], "text"], "column 'x' has no type in Parquet"),
        ("msgpack", [[["k", 1]]], "column 'x' has no type in Parquet"),
        ("msgpack", [[2**53 + 1, 0.5]], "column 'x' h"),
        ("msgpack", [1 << 63], "column 'x' "),
    ]
    for number, (column, values, told) in enumerate(cases):
        path = tmp_path / f"{number}.ffr"
        with FileWriter(path, columns={"x": column}) as writer:
            for value in values:
                writer.write_row({"x": value})
        ran("convert", path, "-o", tmp_path / "a.parquet", code=1)
        assert told in capsysbinary.readouterr().err.decode()
        assert not (tmp_path / "a.parquet").exists()


TEXTS = arrow.table(
    {"text": ["a", None, "c", "d"], "image": arrow.array([{"bytes": b"1"}] * 4, IMAGE)}
)


def save_to_disk(folder: Path, *shards: Any, **more: Any) -> Path:
    """The folder of files that `Dataset.save_to_disk` makes."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_stream(folder / name, shard)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None, **more}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_data_set_gives_rows(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "saved", TEXTS.slice(2), TEXTS.slice(0, 2), TEXTS.slice(0, 0))
    assert kind_of_path(str(folder)) == "huggingface"
    ran("pack", folder, "-o", tmp_path / "a.ffr")
    with FileReader(tmp_path / "a.ffr") as reader:
        assert reader.columns is not None
        assert list(reader.columns) == ["text", "image.bytes", "image.path"]
        rows = reader.rows(range(4))
    assert [row["text"] for row in rows] == ["c", "d", "a", None]
    assert {row["image.path"] for row in rows} == {None}


def test_a_saved_data_set_that_cannot_be_packed_says_why(tmp_path: Path) -> None:
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        ConfigError, match=r"the splits train, test: use one of them, .*/dict/train"
    ):
        open_source([str(tmp_path / "dict")])
    chosen = {"_indices_data_files": [{"filename": "indices.arrow"}]}
    with pytest.raises(ConfigError, match="flatten_indices"):
        open_source([str(save_to_disk(tmp_path / "chosen", TEXTS, **chosen))])
    with pytest.raises(ConfigError, match="the data set is empty"):
        open_source([str(save_to_disk(tmp_path / "empty"))])
    broken = save_to_disk(tmp_path / "broken", TEXTS)
    for text in ("{", "[]", '{"_data_files": [{"filename": "../x.arrow"}]}'):
        (broken / "state.json").write_text(text)
        with pytest.raises(Corrupted, match=r"state\.json"):
            open_source([str(broken)])


def test_parquet_and_arrow(tmp_path: Path) -> None:
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    table = arrow.table(
        {
            "i": arrow.array([1, 2], arrow.int32()),
            "v": arrow.array([[1.0], []], arrow.list_(arrow.float32())),
            "image": arrow.array(
                [{"bytes": b"x", "path": "p"}, {"bytes": b"", "path": "q"}], image
            ),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    with arrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as out:
        out.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        source = open_source([str(tmp_path / name)])
        assert source.length == 2
        assert [c.text for c in source.columns] == ["int32", "float32[?]", "bytes", "str"]
        assert [plain(row) for row in source.rows()] == [
            {"i": 1, "v": [1.0], "image.bytes": b"x", "image.path": "p"},
            {"i": 2, "v": [], "image.bytes": b"", "image.path": "q"},
        ]
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-3])
    with pytest.raises(FireflyerError):
        open_source([str(tmp_path / "a.parquet")])


def test_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    inner = arrow.array([{"b": 2}], arrow.struct([("b", arrow.int64())]))
    parquet.write_table(arrow.table({"a.b": [1], "a": inner}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"two columns would have the name 'a\.b'"):
        open_source([str(tmp_path / "a.parquet")])


def test_arrow_dictionaries_timestamps_and_views(tmp_path: Path) -> None:
    table = arrow.table(
        {
            "d": arrow.array(["x", "y", "x"]).dictionary_encode(),
            "t": arrow.array([1, -2, 3], arrow.timestamp("us", "UTC")),
            "v": arrow.array(["a", "b", "c" * 50], arrow.string_view()),
        }
    )
    with arrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as out:
        out.write_table(table)
    source = open_source([str(tmp_path / "a.arrow")])
    assert [c.text for c in source.columns] == ["str", "int64", "str"]
    assert [list(plain(row).values()) for row in source.rows()] == [
        ["x", 1, "a"], ["y", -2, "b"], ["x", 3, "c" * 50],
    ]  # fmt: skip
