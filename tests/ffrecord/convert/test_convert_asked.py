"""Only what is asked for is read, and it keeps its shape, its unit and its name."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from fireflyer.cli.app import run_line
from fireflyer.errors import ConfigError
from fireflyer.ffrecord import FileReader
from fireflyer.ffrecord.convert.detect import open_source


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in row.items()}


def rows_of(path: Path, *columns: str, kind: str | None = None) -> list[dict[str, Any]]:
    source = open_source([str(path)], kind, columns or None)
    assert not columns or [column.name for column in source.columns] == list(columns)
    return [plain(row) for row in source.rows()]


def save_arrow(path: Path, table: Any) -> Path:
    with arrow.ipc.new_file(str(path), table.schema) as out:
        out.write_table(table)
    return path


def save_tar(path: Path, files: list[tuple[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def save_mds(path: Path) -> Path:
    """One sample with a pickle, which is never loaded."""
    body = np.array([1, 12, 13], "<u4").tobytes() + b"P"
    path.mkdir()
    (path / "a.mds").write_bytes(body)
    shard = {
        "column_names": ["a", "bad"], "column_encodings": ["uint8", "pkl"],
        "column_sizes": [1, 0], "samples": 1, "raw_data": {"basename": "a.mds"}, "format": "mds",
    }  # fmt: skip
    (path / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return path


def save_bad(folder: Path, kind: str) -> str:
    """A data set whose column `bad` cannot be read; its column `a` holds 80."""
    decimals = arrow.array([1], arrow.int32()).cast(arrow.decimal128(12, 2))
    table = arrow.table({"bad": decimals, "a": [80]})
    if kind == "parquet":
        parquet.write_table(table, folder / "a.parquet")
        return str(folder / "a.parquet")
    if kind == "arrow":
        return str(save_arrow(folder / "a.arrow", table))
    if kind == "saved data set":
        saved = folder / "saved"
        saved.mkdir()
        save_arrow(saved / "0.arrow", table)
        (saved / "state.json").write_text('{"_data_files": [{"filename": "0.arrow"}]}')
        (saved / "dataset_info.json").write_text("{}")
        return str(saved)
    if kind == "tar":
        return str(save_tar(folder / "a.tar", [("x.bad.npy", b"?"), ("x.a", b"P"), ("y.a", b"P")]))
    if kind == "npz":
        np.savez(folder / "a.npz", bad=np.array([None]), a=np.array([80]))
        return str(folder / "a.npz")
    if kind == "folder of npy":
        arrays = folder / "arrays"
        arrays.mkdir()
        np.save(arrays / "bad.npy", np.array([None]))
        np.save(arrays / "a.npy", np.array([80]))
        return str(arrays)
    if kind == "mds":
        return str(save_mds(folder / "mds"))
    (folder / "asked_for.py").write_text("rows = [{'bad': object(), 'a': 80}]\n")
    return "asked_for:rows"


@pytest.mark.parametrize(
    "kind",
    ["parquet", "arrow", "saved data set", "tar", "npz", "folder of npy", "mds", "python"],
)
def test_a_column_that_is_not_asked_for_cannot_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    place = save_bad(tmp_path, kind)
    assert run_line(["record", "pack", place, "-o", "b.ffr", "--columns", "bad"]) == 1
    assert run_line(["record", "pack", place, "-o", "a.ffr", "--columns", "a"]) == 0
    with FileReader("a.ffr") as reader:
        if kind == "tar":
            assert [bytes(sample) for sample in reader.read([0, 1])] == [b"P", b"P"]
        else:
            assert plain(reader.rows([0])[0]) == {"a": 80}


def test_sources_need_to_agree_only_about_what_is_asked_for(tmp_path: Path, capsys: Any) -> None:
    for name, more in (("0", {"x": [1.5]}), ("1", {"y": ["b"]})):
        parquet.write_table(arrow.table({"a": [7], **more}), tmp_path / f"{name}.parquet")
    paths = [str(tmp_path / f"{number}.parquet") for number in range(2)]
    out = str(tmp_path / "a.ffr")
    assert run_line(["record", "pack", *paths, "-o", out]) == 1
    assert run_line(["record", "pack", *paths, "-o", out, "--columns", "a"]) == 0
    capsys.readouterr()
    assert run_line(["record", "pack", paths[0], "-o", out, "--columns", "a,z"]) == 1
    assert "0.parquet has no column 'z': it has a, x" in capsys.readouterr().err


NAMES = [b"caf\xe9.txt", b"caf\xe8.txt", b"plain.txt"]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("long", [b"", b"n" * 120])
def test_names_of_a_tar_that_are_not_utf8_stay_apart(
    tmp_path: Path, form: int, long: bytes, capsys: Any
) -> None:
    names = [(long + b"/" if long and form == tarfile.USTAR_FORMAT else long) + n for n in NAMES]
    files = [(name.decode(errors="surrogateescape"), name[-8:-4]) for name in names]
    path = save_tar(tmp_path / "a.tar", files, format=form, errors="surrogateescape")
    with tarfile.open(path, errors="surrogateescape") as archive:
        expected = [archive.extractfile(member).read().decode("latin-1") for member in archive]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"the name '.*\\udce9' is not UTF-8: select"):
        open_source([str(path)])
    data = [(n.replace(".txt", ".bin"), d) for n, d in files]
    path = save_tar(tmp_path / "b.tar", data, format=form, errors="surrogateescape")
    rows = rows_of(path, "bin")
    assert [row["bin"].decode("latin-1") for row in rows] == expected
    out = str(tmp_path / "b.ffr")
    assert run_line(["record", "pack", str(path), "-o", out]) == 1
    assert r"\udce9' is not UTF-8" in capsys.readouterr().err


def tensors(shape: list[int], order: list[int] | None, rows: int = 2) -> Any:
    kind = arrow.fixed_shape_tensor(arrow.int32(), shape, permutation=order)
    size = int(np.prod(shape))
    flat = arrow.array(range(rows * size), arrow.int32())
    stored = arrow.FixedSizeListArray.from_arrays(flat, size)
    return arrow.ExtensionArray.from_storage(kind, stored)


@pytest.mark.parametrize("order", [None, [0, 2, 1], [2, 1, 0]])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_tensor_keeps_its_shape(tmp_path: Path, order: list[int] | None, suffix: str) -> None:
    made = tensors([2, 3, 4], order)
    table = arrow.table({
        "t": made,
        "in": arrow.StructArray.from_arrays([made], ["t"]),
        "list": arrow.ListArray.from_arrays([0, 2, 2], made),
    })  # fmt: skip
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path)
    else:
        save_arrow(path, table)
    expected = made.to_numpy_ndarray()
    source = open_source([str(path)])
    sizes = list(expected.shape[1:])
    assert [c.text for c in source.columns] == [
        f"int32{sizes}", f"int32{sizes}", f"int32[?, {str(sizes)[1:]}",
    ]  # fmt: skip
    rows = list(source.rows())
    for number, row in enumerate(rows):
        assert np.array_equal(row["t"], expected[number])
        assert np.array_equal(row["in.t"], expected[number])
    assert np.array_equal(rows[0]["list"], expected)
    assert rows[1]["list"].shape == (0, *sizes)
    out = tmp_path / "b.parquet"
    assert run_line(["record", "convert", str(path), "-o", str(out)]) == 0
    assert parquet.read_table(out)["t"].to_pylist() == expected.tolist()


def test_axes_of_a_tensor_move_as_the_format_says(tmp_path: Path) -> None:
    """pyarrow 26 reads such an order with overlapping strides, so the specification decides."""
    made = tensors([2, 3, 4], [2, 0, 1])
    (row, _) = open_source([str(save_arrow(tmp_path / "a.arrow", arrow.table({"t": made})))]).rows()
    assert row["t"].shape == made[0].to_numpy().shape
    assert np.array_equal(row["t"], np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1))


def test_a_tensor_with_nulls_in_it_is_nested_in_its_shape(tmp_path: Path) -> None:
    kind = arrow.fixed_shape_tensor(arrow.int64(), [2, 2], permutation=[1, 0])
    stored = arrow.array([[1, None, 3, 4], None], arrow.list_(arrow.int64(), 4))
    made = arrow.ExtensionArray.from_storage(kind, stored)
    around = arrow.ListArray.from_arrays([0, 2, 2], made)
    path = save_arrow(tmp_path / "a.arrow", arrow.table({"t": made, "list": around}))
    assert rows_of(path) == [
        {"t": [[1, 3], [None, 4]], "list": [[[1, 3], [None, 4]], None]},
        {"t": None, "list": []},
    ]


TIMES = [
    arrow.timestamp("us"), arrow.timestamp("ns", "UTC"), arrow.date32(), arrow.date64(),
    arrow.time32("ms"), arrow.time64("us"), arrow.duration("s"),
]  # fmt: skip


@pytest.mark.parametrize("kind", TIMES, ids=str)
def test_times_are_integers_of_their_unit_at_every_depth(tmp_path: Path, kind: Any) -> None:
    number = arrow.int32() if str(kind) in ("date32[day]", "time32[ms]") else arrow.int64()
    day = 86_400_000 if kind == arrow.date64() else 60_000
    around: list[tuple[Any, Any]] = [
        (lambda of: of, [day, None]),
        (lambda of: arrow.list_(of), [[day, 2 * day], []]),
        (lambda of: arrow.list_(of, 2), [[0, day], [day, 0]]),
        (lambda of: arrow.large_list(arrow.list_(of)), [[[day], []], None]),
        (lambda of: arrow.list_(arrow.struct([("x", of)])), [[{"x": day}, None], []]),
        (lambda of: arrow.map_(arrow.string(), of), [[("k", day)], []]),
    ]
    table, expected = (
        arrow.table({
            str(n): arrow.array(values, make(number)).cast(make(of))
            for n, (make, values) in enumerate(around)
        })
        for of in (kind, number)
    )  # fmt: skip
    saved = [save_arrow(tmp_path / f"{n}.arrow", t) for n, t in enumerate((table, expected))]
    found, wanted = (open_source([str(path)]) for path in saved)
    assert found.columns == wanted.columns
    assert [plain(row) for row in found.rows()] == [plain(row) for row in wanted.rows()]


def test_rows_without_a_typed_column_are_counted(tmp_path: Path) -> None:
    table = arrow.table({"tags": [["a"], ["b", "c"], []], "a": [1, 2, 3]})
    path = save_arrow(tmp_path / "a.arrow", table)
    assert open_source([str(path)], None, ["tags"]).length == 3
    assert rows_of(path, "tags") == [{"tags": tags} for tags in (["a"], ["b", "c"], [])]
