"""Rows go into record files and out again unchanged, and nothing half-made stays."""

import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fireflyer.errors import ConfigError, Corrupted, NoSpace
from fireflyer.ffrecord import FileReader, FileWriter, open_folder
from fireflyer.ffrecord.convert import exporters, repack, statistics, verification
from fireflyer.ffrecord.convert.atomic_output import refuse_existing, write_atomically
from fireflyer.ffrecord.convert.detect import open_source
from fireflyer.ffrecord.convert.formats.folder import FolderSource
from fireflyer.ffrecord.convert.formats.records import RecordSource
from fireflyer.ffrecord.convert.preview import as_text, page
from fireflyer.ffrecord.convert.record_writer import Form, Plan, write_rows
from fireflyer.ffrecord.convert.source import Column, Row, Selected

ROWS: list[Row] = [
    {
        "id": np.array(i, np.int64),
        "v": np.full((i % 3, 2), i / 2, np.float32),
        "text": f"<b>{i}</b> ä",
        "raw": bytes([i]) * i,
    }
    for i in range(40)
]
COLUMNS = (
    Column("id", "int64"),
    Column("v", "float32", (None, 2)),
    Column("text", "str"),
    Column("raw", "bytes"),
)


def quiet(samples: int, held: int) -> None:
    """Progress that nobody sees."""


def plain(row: Row) -> dict[str, Any]:
    return {
        name: v.tolist() if isinstance(v, np.ndarray) else bytes(v) if name == "raw" else v
        for name, v in row.items()
    }


EXPECTED = [plain(row) for row in ROWS]


def back(path: Path | str, *more: str) -> list[dict[str, Any]]:
    return [plain(row) for row in open_source([str(path), *more]).rows()]


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    """ROWS in one file."""
    plan = Plan(out=tmp_path / "typed.ffr", total=len(ROWS))
    write_rows(iter(ROWS), COLUMNS, plan, quiet)
    return plan.out


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("total", [None, 40])
def test_rows_come_back(tmp_path: Path, compression: str | None, total: int | None) -> None:
    form = Form(compression=compression)
    plan = Plan(out=tmp_path / "a.ffr", total=total, form=form)
    written = write_rows(iter(ROWS), COLUMNS, plan, quiet)
    assert (written.files, written.samples) == ([str(plan.out)], 40)
    assert written.bytes == plan.out.stat().st_size
    assert RecordSource(plan.out).columns == COLUMNS
    assert back(plan.out) == EXPECTED


@pytest.mark.parametrize(
    ("plan", "counts"),
    [
        ({"per_file": 15, "total": 40}, [15, 15, 10]),
        ({"per_file": 15}, [15, 15, 10]),
        ({"per_file": 40, "total": 40}, [40]),
        ({"file_bytes": 1}, [1] * 40),
        ({"file_bytes": 1 << 30}, [40]),
    ],
)
def test_parts(tmp_path: Path, plan: dict[str, Any], counts: list[int]) -> None:
    out = tmp_path / "parts"
    written = write_rows(iter(ROWS), COLUMNS, Plan(out=out, **plan), quiet)
    assert written.files == [str(out / f"PART_{i:05d}.ffr") for i in range(len(counts))]
    assert [FileReader(name).n for name in written.files] == counts
    assert back(out) == EXPECTED
    assert os.listdir(tmp_path) == ["parts"]


def test_no_rows_make_one_empty_file(tmp_path: Path) -> None:
    for plan in (Plan(out=tmp_path / "a.ffr"), Plan(out=tmp_path / "p", per_file=3)):
        (name,) = write_rows(iter([]), COLUMNS, plan, quiet).files
        assert FileReader(name).n == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConfigError, ZeroDivisionError])
@pytest.mark.parametrize(
    "options",
    [{}, {"total": 40}, {"per_file": 5}, {"file_bytes": 100}, {"total": 40, "per_file": 5}],
)
def test_an_interrupt_leaves_nothing(
    tmp_path: Path, error: type[BaseException], options: dict[str, Any]
) -> None:
    def failing() -> Iterator[Row]:
        yield from ROWS[:12]
        raise error("stop")

    with pytest.raises(error):
        write_rows(failing(), COLUMNS, Plan(out=tmp_path / "a.ffr", **options), quiet)
    assert os.listdir(tmp_path) == []


def test_what_is_there_is_replaced_only_by_force_and_only_when_the_new_is_whole(
    tmp_path: Path, typed: Path
) -> None:
    folder = tmp_path / "parts"
    write_rows(iter(ROWS), COLUMNS, Plan(out=folder, per_file=9), quiet)
    for plan in (Plan(out=typed), Plan(out=folder, per_file=9)):
        with pytest.raises(ConfigError, match="already exists"):
            write_rows(iter(ROWS), COLUMNS, plan, quiet)

    def failing() -> Iterator[Row]:
        yield ROWS[0]
        raise KeyboardInterrupt

    for plan in (Plan(out=typed, force=True), Plan(out=folder, per_file=9, force=True)):
        with pytest.raises(KeyboardInterrupt):
            write_rows(failing(), COLUMNS, plan, quiet)
        assert back(plan.out) == EXPECTED
        write_rows(iter(ROWS[:3]), COLUMNS, plan, quiet)
        assert back(plan.out) == EXPECTED[:3]
    assert sorted(os.listdir(tmp_path)) == ["parts", "typed.ffr"]


def test_v1_holds_bytes_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="v1 files hold one column"):
        write_rows(iter(ROWS), COLUMNS, Plan(out=tmp_path / "a.ffr", form=Form(1)), quiet)
    with pytest.raises(ConfigError, match="v1 files cannot hold compressed"):
        Form(1, "zstd")
    with pytest.raises(ConfigError, match="expected zstd"):
        Form(None, "gzip")
    rows = ({"text": row["text"]} for row in ROWS)
    plan = Plan(out=tmp_path / "a.ffr", form=Form(1))
    write_rows(rows, COLUMNS[2:3], plan, quiet)
    assert [FileReader(plan.out).read_one(i).tobytes().decode() for i in (0, 39)] == [
        "<b>0</b> ä", "<b>39</b> ä",
    ]  # fmt: skip


def test_bytes_alone_are_v1_unless_compressed(tmp_path: Path) -> None:
    rows = [{"data": b"x" * 1000}] * 3
    for form, version in ((Form(), 1), (Form(2), 2), (Form(None, "zstd"), 2)):
        plan = Plan(out=tmp_path / f"{version}{form.compression}.ffr", form=form)
        write_rows(iter(rows), (Column("data", "bytes"),), plan, quiet)
        listed = statistics.describe_file(str(plan.out))
        assert (listed.version, listed.compressed) == (version, form.compression is not None)
        assert [bytes(row["data"]) for row in RecordSource(plan.out).rows()] == [b"x" * 1000] * 3


def test_an_image_folder_goes_in_with_labels_or_as_a_tree(tmp_path: Path) -> None:
    for name in ("b/1.png", "a/2.png"):
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        (tmp_path / "in" / name).write_bytes(name.encode())
    source = FolderSource(tmp_path / "in")
    repack.pack(source, Plan(out=tmp_path / "rows.ffr"), 2, quiet)
    with FileReader(tmp_path / "rows.ffr") as reader:
        assert [(row["class"], int(row["label"])) for row in reader.rows([0, 1])] == [
            ("a", 0),
            ("b", 1),
        ]
    repack.pack_tree(source, Plan(out=tmp_path / "tree.ffr", form=Form(1)))
    with open_folder(tmp_path / "tree.ffr") as tree:
        assert tree.read_one("b/1.png").tobytes() == b"b/1.png"


def test_through_a_tar(tmp_path: Path, typed: Path) -> None:
    source = open_source([str(typed)])
    written = exporters.export(source, "tar", tmp_path / "a.tar", False, quiet)
    assert written.samples == 40
    names = {"id": "id.cls", "v": "v.npy", "text": "text.txt", "raw": "raw"}
    found = back(tmp_path / "a.tar")
    assert found == [
        {"key": f"{i:09d}"} | {names[k]: v for k, v in row.items()}
        for i, row in enumerate(EXPECTED)
    ]
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert archive.getnames()[:2] == ["000000000.id.cls", "000000000.v.npy"]


def test_a_tar_keeps_its_keys_through_a_record_file(tmp_path: Path) -> None:
    files = [("b/9.x.jpg", b"1"), ("b/9.cls", b"7"), ("a.x.jpg", b"2"), ("a.cls", b"8")]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    repack.pack(open_source([str(tmp_path / "a.tar")]), Plan(out=tmp_path / "a.ffr"), 1, quiet)
    source = open_source([str(tmp_path / "a.ffr")])
    exporters.export(source, "tar", tmp_path / "b.tar", False, quiet)
    with tarfile.open(tmp_path / "b.tar") as archive:
        found = [(member.name, archive.extractfile(member)) for member in archive]
        assert [(name, file.read()) for name, file in found if file] == files
    assert back(tmp_path / "b.tar") == back(tmp_path / "a.ffr")
    exporters.export(Selected(source, ["cls"]), "tar", tmp_path / "c.tar", False, quiet)
    assert [row["key"] for row in back(tmp_path / "c.tar")] == ["000000000", "000000001"]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["a", "b", "b"], "row 2: the key 'b' equals that of the previous row"),
        *(
            (["ok", key], "row 1: the key .* cannot name files")
            for key in ("", "a.b", "/a", "../a", "a\0")
        ),
    ],
)
def test_keys_that_a_tar_would_change_are_refused(
    tmp_path: Path, keys: list[str], told: str
) -> None:
    with FileWriter(tmp_path / "a.ffr", columns={"key": "str", "n": "int64"}) as writer:
        for number, key in enumerate(keys):
            writer.write_row({"key": key, "n": number})
    source = open_source([str(tmp_path / "a.ffr")])
    with pytest.raises(ConfigError, match=told):
        exporters.export(source, "tar", tmp_path / "a.tar", False, quiet)
    assert os.listdir(tmp_path) == ["a.ffr"]


def test_through_json_lines(tmp_path: Path, typed: Path) -> None:
    source = Selected(open_source([str(typed)]), ["id", "text"])
    exporters.export(source, "jsonl", tmp_path / "a.jsonl", False, quiet)
    assert back(tmp_path / "a.jsonl") == [{k: r[k] for k in ("id", "text")} for r in EXPECTED]
    exporters.export(open_source([str(typed)]), "jsonl", tmp_path / "b.jsonl", False, quiet)
    first = json.loads((tmp_path / "b.jsonl").read_text().splitlines()[2])
    assert first == {"id": 2, "v": [[1.0, 1.0], [1.0, 1.0]], "text": "<b>2</b> ä", "raw": "AgI="}


def test_numbers_that_json_lacks_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1j]))
    source = open_source([str(tmp_path / "a.npy")])
    with pytest.raises(ConfigError, match="column 'data': JSON cannot represent"):
        exporters.export(source, "jsonl", tmp_path / "a.jsonl", False, quiet)
    assert os.listdir(tmp_path) == ["a.npy"]


def test_through_a_folder_of_arrays(tmp_path: Path, typed: Path) -> None:
    source = Selected(open_source([str(typed)]), ["id"])
    exporters.export(source, "npy", tmp_path / "arrays", False, quiet)
    assert back(tmp_path / "arrays") == [{"id": i} for i in range(40)]
    with pytest.raises(ConfigError, match="column 'v' is float32"):
        exporters.export(open_source([str(typed)]), "npy", tmp_path / "more", False, quiet)
    assert sorted(os.listdir(tmp_path)) == ["arrays", "typed.ffr"]


@pytest.mark.parametrize("version", [1, 2])
def test_merge_and_split_copy_samples_as_they_are(tmp_path: Path, version: int) -> None:
    samples = [bytes([i]) * i for i in range(30)]
    for number, part in enumerate((samples[:10], samples[10:])):
        with FileWriter(tmp_path / f"{number}.ffr", version=version) as writer:
            for sample in part:
                writer.write_one(sample)
    source = repack.same_kind([str(tmp_path / "0.ffr"), str(tmp_path / "1.ffr")])
    form = repack.form_of(source, None)
    assert form == Form(version)
    repack.pack(source, Plan(out=tmp_path / "all.ffr", form=form), 1, quiet)
    assert [s.tobytes() for s in FileReader(tmp_path / "all.ffr").read(range(30))] == samples
    out = tmp_path / "sets"
    repack.split_by_fractions(
        source, [0.5, 0.3, 0.2], ["train", "val", "test"], out, form,
        seed=3, force=False, advance=quiet,
    )  # fmt: skip
    found = {p.name: FileReader(p) for p in sorted(out.iterdir())}
    assert {name: reader.n for name, reader in found.items()} == {
        "test.ffr": 6, "train.ffr": 15, "val.ffr": 9,
    }  # fmt: skip
    every = [s.tobytes() for reader in found.values() for s in reader.read(range(reader.n))]
    assert sorted(every) == sorted(samples)
    assert every != samples


def test_rows_are_merged_and_stay_compressed(tmp_path: Path) -> None:
    columns = (Column("t", "str"), Column("n", "int64"))
    for number in range(2):
        plan = Plan(out=tmp_path / f"{number}.ffr", form=Form(None, "zstd"))
        write_rows(iter([{"t": "x" * 999, "n": np.array(number)}]), columns, plan, quiet)
    source = repack.same_kind([str(tmp_path / "0.ffr"), str(tmp_path / "1.ffr")])
    plan = Plan(out=tmp_path / "all.ffr", form=repack.form_of(source, None))
    repack.pack(source, plan, 1, quiet)
    assert statistics.describe_file(str(plan.out)).compressed
    assert [int(row["n"]) for row in RecordSource(plan.out).rows()] == [0, 1]


def test_what_does_not_fit_together_is_not_merged(tmp_path: Path, typed: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "f").write_bytes(b"1")
    repack.pack_tree(FolderSource(tmp_path / "in"), Plan(out=tmp_path / "tree.ffr"))
    with FileWriter(tmp_path / "plain.ffr", 0):
        pass
    with pytest.raises(ConfigError, match="cannot copy the packed folder"):
        repack.same_kind([str(tmp_path / "tree.ffr")])
    with pytest.raises(ConfigError, match="convert one of them first"):
        repack.same_kind([str(typed), str(tmp_path / "plain.ffr")])


@pytest.mark.parametrize(
    ("total", "fractions", "counts"),
    [(10, [0.8, 0.1, 0.1], [8, 1, 1]), (3, [0.5, 0.5], [2, 1]), (0, [0.5, 0.5], [0, 0]),
     (7, [1 / 3] * 3, [2, 3, 2])],
)  # fmt: skip
def test_shares(total: int, fractions: list[float], counts: list[int]) -> None:
    assert repack.shares(total, fractions) == counts


@pytest.mark.parametrize("fractions", [[], [0.5], [0.5, 0.6], [1.5, -0.5], [float("nan")]])
def test_fractions_that_are_none(fractions: list[float]) -> None:
    with pytest.raises(ConfigError, match="sum to 1"):
        repack.shares(10, fractions)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(bytes(data))


def test_verify_lists_the_first_damages_of_all_files(tmp_path: Path) -> None:
    names = []
    for number in range(3):
        path = tmp_path / f"{number}.ffr"
        with FileWriter(path, 4) as writer:
            for i in range(4):
                writer.write_one(bytes([i]) * 10)
        names.append(str(path))
    sound = verification.verify(names, data=True, most=10, advance=quiet)
    assert (sound.files, sound.samples, sound.damages) == (3, 12, [])
    flip(tmp_path / "0.ffr", 12 + 48 + 5)
    flip(tmp_path / "0.ffr", 12 + 48 + 25)
    flip(tmp_path / "2.ffr", 3)
    found = verification.verify(names, data=True, most=10, advance=quiet)
    assert [any(w in d for d in found.damages) for w in ("sample 0", "sample 2", "2.ffr")] == [
        True
    ] * 3
    assert (len(found.damages), found.bad_files, found.more) == (3, 2, False)
    few = verification.verify(names, data=True, most=1, advance=quiet)
    assert (len(few.damages), few.more) == (1, True)
    assert verification.worst(few) == "at least 1 damage in 1 of 1 files checked"
    metadata = verification.verify(names, data=False, most=10, advance=quiet)
    assert (len(metadata.damages), metadata.bad_files) == (1, 1)


def test_verify_finds_every_flipped_byte_of_a_file_with_columns(typed: Path) -> None:
    with FileReader(typed) as reader:
        native = reader._open()
        place = native.extents(np.arange(40)).view(np.int64).reshape(40, 4)
    whole = typed.read_bytes()
    for index in (0, 17, 39):
        typed.write_bytes(whole)
        flip(typed, int(place[index, 0]) + 3)
        found = verification.verify([str(typed)], data=True, most=10, advance=quiet)
        assert len(found.damages) == 1
        assert f"sample {index}" in found.damages[0]


HOSTILE = "<script>alert(1)</script>\"'&"


def test_the_preview_escapes_everything_and_loads_nothing(tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n" + b"not decoded"
    rows: list[Row] = [
        {HOSTILE: HOSTILE, "image": png, "v": np.arange(3), "b": HOSTILE.encode(), "x": b"\x00\xff"}
    ]
    columns = (
        Column(HOSTILE, "str"), Column("image", "bytes"), Column("v", "int64", (None,)),
        Column("b", "bytes"), Column("x", "bytes"),
    )  # fmt: skip
    path = tmp_path / "<i>&.ffr"
    write_rows(iter(rows), columns, Plan(out=path), quiet)
    html = page([str(path)])
    assert "<script" not in html
    assert "<i>" not in html
    assert "&lt;script&gt;" in html
    assert "data:image/png;base64,iVBOR" in html
    assert html.count("src=") == html.count('src="data:image/')
    assert "<svg" in html
    assert "00ff" in html
    assert "default-src 'none'" in html


@pytest.mark.parametrize(("samples", "shown"), [(0, 5), (3, 5), (100, 5), (100, 0)])
def test_the_preview_shows_samples_spread_evenly(tmp_path: Path, samples: int, shown: int) -> None:
    with FileWriter(tmp_path / "a.ffr", samples) as writer:
        for i in range(samples):
            writer.write_one(f"text {i}".encode())
    html = page([str(tmp_path / "a.ffr")], shown)
    assert html.count('class="head"') == min(samples, shown)
    if samples > shown > 0:
        assert "text 80<" in html


def test_a_damaged_sample_is_not_shown(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr", 1) as writer:
        writer.write_one(b"hello")
    flip(tmp_path / "a.ffr", 25)
    with pytest.raises(Corrupted):
        page([str(tmp_path / "a.ffr")])


@pytest.mark.parametrize(
    ("data", "cut", "text"),
    [
        (b"abc", False, "abc"),
        (b"a\xc3", True, "a"),
        (b"a\xc3", False, None),
        (b"\xff\xfe", True, None),
        (b"\x00", True, None),
    ],
)
def test_what_counts_as_text(data: bytes, cut: bool, text: str | None) -> None:
    assert as_text(data, cut=cut) == text


def test_lengths_in_words() -> None:
    assert [statistics.size_text(s) for s in (0, 1023, 1536, 5 << 30)] == [
        "0 B", "1023 B", "1.5 KiB", "5 GiB",
    ]  # fmt: skip
    found = statistics.of_lengths(np.array([1, 2, 3, 4, 100]))
    assert found == statistics.Lengths(min=1, median=3, mean=22.0, p95=100, max=100)


def test_statistics_of_many_samples_look_at_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "SAMPLED", 10)
    with FileWriter(tmp_path / "a.ffr", 1000) as writer:
        for i in range(1000):
            writer.write_one(bytes(i))
    with FileReader(tmp_path / "a.ffr") as reader:
        assert statistics.some_lengths(reader).tolist() == list(range(0, 1000, 100))


def test_a_full_disk_is_no_space(tmp_path: Path) -> None:
    out = Path("/dev/full/a.tar")
    with pytest.raises(ConfigError, match="its folder does not exist"):
        refuse_existing(out, force=False)

    def fill(path: Path) -> None:
        path.write_bytes(b"half")
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    with pytest.raises(NoSpace, match="cannot write"):
        write_atomically(tmp_path / "a.tar", fill)
    assert os.listdir(tmp_path) == []
