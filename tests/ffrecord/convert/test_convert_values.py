"""Values come out of an export as they went in, or the export is refused and leaves nothing."""

import io
import json
import math
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from fireflyer.cli.app import run_line
from fireflyer.errors import ConfigError, Corrupted, StorageError
from fireflyer.ffrecord import FileWriter
from fireflyer.ffrecord.convert import exporters
from fireflyer.ffrecord.convert.detect import open_source
from fireflyer.ffrecord.convert.formats.torch_dataset import DatasetSource


def saved(path: Path, columns: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    with FileWriter(path, columns=columns) as writer:
        for row in rows:
            writer.write_row(row)
    return path


def ran(*arguments: object) -> int:
    return run_line(["record", *map(str, arguments)])


def refusal(capsys: Any, *arguments: object) -> str:
    """The error of a command that leaves no new file."""
    before = sorted(os.listdir())
    assert ran(*arguments) == 1
    assert sorted(os.listdir()) == before
    return str(capsys.readouterr().err)


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [{k: plain(v) for k, v in row.items()} for row in open_source([str(path)]).rows()]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


ODD = {
    "scalar": ("float32", np.float32("nan")),
    "array": (("float16", [None]), np.array([1.5, np.inf, -np.inf], np.float16)),
    "nested": ("msgpack", {"deep": [math.nan, {"x": -math.inf}], "n": 1}),
    "text": ("str", "ä"),
    "raw": ("bytes", b"\xff"),
}


def test_nan_and_infinity_are_written_as_python_does(here: Path, capsysbinary: Any) -> None:
    path = saved(
        here / "a.ffr", {k: c for k, (c, _) in ODD.items()}, [{k: v for k, (_, v) in ODD.items()}]
    )
    assert ran("convert", path, "-o", "a.jsonl") == 0
    text = Path("a.jsonl").read_text()
    expected = {
        "scalar": math.nan, "array": [1.5, math.inf, -math.inf],
        "nested": {"deep": [math.nan, {"x": -math.inf}], "n": 1}, "text": "ä", "raw": "/w==",
    }  # fmt: skip
    assert repr(json.loads(text)) == repr(expected)
    capsysbinary.readouterr()
    assert ran("cat", path, 0) == 0
    assert capsysbinary.readouterr().out.decode() == text
    assert ran("convert", path, "-o", "b.jsonl", "--nan", "null") == 0
    strict = json.loads(Path("b.jsonl").read_text(), parse_constant=pytest.fail)
    assert strict["array"] == [1.5, None, None]
    assert strict["nested"] == {"deep": [None, {"x": None}], "n": 1}
    capsysbinary.readouterr()
    assert ran("cat", path, 0, "--column", "nested", "--nan", "null") == 0
    assert capsysbinary.readouterr().out == b'{"deep":[null,{"x":null}],"n":1}'
    (row,) = rows_of(Path("a.jsonl"))
    assert repr((row["scalar"], row["array"])) == repr((math.nan, [1.5, math.inf, -math.inf]))
    assert repr(json.loads(row["nested"])) == repr(expected["nested"])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"a": "\\ud800"}', r"its text holds '\\ud800', one half of a character"),
        ('{"a": [{"\\udfff x": 1}]}', r"its text holds '\\udfff', one half of a character"),
        ('{"a": [NaN, 1e999]}', "not a JSON object"),
        ('{"a": nan}', "not a JSON object"),
    ],
)
def test_json_that_no_row_can_hold_says_why(line: str, told: str) -> None:
    Path("a.jsonl").write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(Corrupted, match="line 2: .*" + told):
        open_source(["a.jsonl"])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([[], [1, 2]], "int64[?]"),
        ([[0.5], []], "float64[?]"),
        ([[True], [], [False]], "bool[?]"),
        ([[], [[1], [2]], [[], []]], "int64[?, ?]"),
        ([[], [2**53 + 1]], "int64[?]"),
        ([[[]], [1]], "str"),
        ([[], []], "str"),
        ([[], ["a"]], "str"),
        ([[], 1], "str"),
    ],
)
def test_an_empty_list_fits_an_array_column(values: list[Any], kind: str) -> None:
    Path("a.jsonl").write_text("".join(json.dumps({"a": value}) + "\n" for value in values))
    source = open_source(["a.jsonl"])
    assert source.columns[0].text == kind
    found = [plain(row["a"]) for row in source.rows()]
    assert [json.loads(v) if kind == "str" else v for v in found] == values


def test_lists_of_a_data_set_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    Path("lists_of_mine.py").write_text("rows = [{'a': [1]}, {'a': []}]\nbig = [0.5, 2**53 + 1]\n")
    found = [row["a"] for row in DatasetSource("lists_of_mine:rows").rows()]
    assert [(a.dtype.name, a.tolist()) for a in found] == [("int64", [1]), ("int64", [])]
    with pytest.raises(ConfigError, match="item 1: column 'data' is float64, this value is int64"):
        list(DatasetSource("lists_of_mine:big").rows())


@pytest.mark.parametrize(
    "columns",
    [
        {"t": "str", "t.txt": "str"},
        {"i": "int32", "i.cls": "int64"},
        {"v": ("float32", [2]), "v.npy": "float64"},
        {"n": "msgpack", "n.json": "str"},
        {"a/b": "bytes", "field_a_b": "bytes"},
    ],
)
def test_two_columns_of_one_name_in_a_tar_are_refused(
    here: Path, capsys: Any, columns: dict[str, Any]
) -> None:
    path = saved(here / "a.ffr", columns, [])
    one, two = columns
    told = refusal(capsys, "convert", path, "-o", "a.tar")
    assert f"the columns {one!r} and {two!r} would both be files" in told


def test_a_tar_holds_what_the_rows_held(here: Path) -> None:
    columns = {"u": "uint64", "i": "int8", "n": "msgpack", "c": "complex64", "e": ("int16", [0, 2])}
    values = {
        "u": 2**64 - 1, "i": -5, "n": "text", "c": np.complex64(1j), "e": np.zeros((0, 2), np.int16),
    }  # fmt: skip
    path = saved(here / "a.ffr", columns, [values, values | {"n": [1, {"a": b"x"}]}])
    assert ran("convert", path, "-o", "a.tar") == 0
    with tarfile.open("a.tar") as archive:
        held = {m.name: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]
    assert held["000000000.i.cls"] == b"-5"
    assert np.load(io.BytesIO(held["000000000.u.npy"])) == np.uint64(2**64 - 1)
    assert [json.loads(held[f"00000000{n}.n.json"]) for n in (0, 1)] == ["text", [1, {"a": "eA=="}]]
    first = next(open_source(["a.tar"]).rows())
    assert first["u.npy"].dtype == np.uint64
    assert first["e.npy"].shape == (0, 2)


def test_the_first_key_has_no_row_before_it(here: Path, capsys: Any) -> None:
    path = saved(here / "a.ffr", {"key": "str", "n": "int64"}, [{"key": "", "n": 1}])
    assert "row 0: the key '' cannot name files" in refusal(capsys, "convert", path, "-o", "a.tar")


@pytest.mark.parametrize(
    ("shape", "value"),
    [([0], (0,)), ([2, 0], (2, 0)), ([0, 3], (0, 3)), ([None, 0], (5, 0)), ([2, None], (2, 0))],
)
def test_an_axis_of_size_0_in_parquet(here: Path, shape: list[Any], value: tuple[int, ...]) -> None:
    array = np.zeros(value, np.int32)
    path = saved(here / "a.ffr", {"v": ("int32", shape), "n": "int64"}, [{"v": array, "n": 1}] * 2)
    assert ran("convert", path, "-o", "a.parquet") == 0
    assert parquet.read_table("a.parquet")["v"].to_pylist() == [array.tolist()] * 2
    assert rows_of(Path("a.parquet")) == rows_of(path)


def test_a_value_that_has_no_type_in_parquet_names_its_column(here: Path, capsys: Any) -> None:
    made = arrow.array([[("k", 1)], []], arrow.map_(arrow.string(), arrow.int64()))
    parquet.write_table(arrow.table({"n": [1, 2], "m": made}), "map.parquet")
    assert ran("pack", "map.parquet", "-o", "a.ffr") == 0
    assert "column 'm' has no type in Parquet" in refusal(
        capsys, "convert", "a.ffr", "-o", "b.parquet"
    )
    path = saved(here / "b.ffr", {"n": "msgpack"}, [{"n": [2**53 + 1, 0.5]}])
    told = refusal(capsys, "convert", path, "-o", "b.parquet")
    assert "column 'n' h" in told
    path = saved(here / "c.ffr", {"n": "msgpack"}, [{"n": {"a": 1}}, {"n": {"b": [math.nan]}}])
    assert ran("convert", path, "-o", "c.parquet") == 0
    found = parquet.read_table("c.parquet")["n"].to_pylist()
    assert repr(found) == repr([{"a": 1, "b": None}, {"a": None, "b": [math.nan]}])


@pytest.mark.parametrize("kind", exporters.EXPORTS)
def test_an_export_is_read_back_before_it_has_its_name(
    here: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A library that writes other bytes than it was given."""
    path = saved(here / "a.ffr", {"v": ("int64", [2])}, [{"v": np.array([n, n])} for n in range(3)])
    source = open_source([str(path)])
    if kind == "tar":
        add = tarfile.TarFile.addfile
        monkeypatch.setattr(
            tarfile.TarFile,
            "addfile",
            lambda self, info, data: add(self, info, io.BytesIO(data.read()[:-8] + bytes(8))),
        )
    elif kind == "parquet":
        write = parquet.ParquetWriter.write_batch
        monkeypatch.setattr(
            parquet.ParquetWriter,
            "write_batch",
            lambda self, batch, **more: write(self, batch.take(arrow.array([0, 1, 1])), **more),
        )
    else:
        opened = open

        def damaging(name: Any, mode: str) -> Any:
            if mode == "rb":
                return io.BytesIO(Path(name).read_bytes().replace(b"2", b"3"))
            return opened(name, mode)

        load = np.load

        def loading(name: Any, *more: Any, **options: Any) -> Any:
            return load(name, *more, **options) + 1

        if kind == "npy":
            monkeypatch.setattr(np, "load", loading)
        else:
            monkeypatch.setattr(exporters, "open", damaging, raising=False)
    with pytest.raises(StorageError, match=r"a\.ffr: the new .*; it is deleted"):
        exporters.export(source, kind, here / "out", False, lambda count, held: None)
    assert os.listdir() == ["a.ffr"]
