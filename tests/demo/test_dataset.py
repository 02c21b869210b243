"""A data set is whole or absent, found again when nothing changed, and clear about text that cannot do."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import cases
from tokenizers import Tokenizer

from fireflyer.demo import dataset
from fireflyer.demo.dataset import Settings, cut, load_meta, prepare, read_text, train_bpe
from fireflyer.errors import ConfigError
from fireflyer.ffrecord import FileReader

BYTES = Settings(tokens="bytes", context=16)
Told = list[tuple[str, int, int]]


def silent(_stage: str, _done: int, _total: int) -> None: ...


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(8):
        lines = [f"def function_{number}_{i}(x): return x + {i}\n" for i in range(60)]
        (folder / f"m{number}.txt").write_text("".join(lines))
    return folder


def samples(folder: Path, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    with FileReader(folder / name) as reader:
        rows = [np.asarray(row).view("<u2") for row in reader.read(range(len(reader)))]
    return np.stack(rows)


def test_records_hold_the_text_token_for_token(texts: Path, tmp_path: Path) -> None:
    text = read_text(texts)
    folder = prepare(text, tmp_path / "data", BYTES, silent)
    meta = load_meta(folder)
    train, val = samples(folder, "train.ffr"), samples(folder, "val.ffr")
    assert (len(train), len(val)) == (meta.train_samples, meta.val_samples)
    assert train.shape[1] == 17
    stream = np.frombuffer(b"\0".join(content for _, content in text.files), np.uint8)
    expected = {row.tobytes() for row in cut(stream.astype(np.uint16), 16)}
    assert {row.tobytes() for row in [*train, *val]} == expected
    assert len(train) + len(val) == len(cut(stream.astype(np.uint16), 16))


def test_bpe_records_decode_to_the_text(texts: Path, tmp_path: Path) -> None:
    text = read_text(texts)
    folder = prepare(text, tmp_path / "data", Settings(vocabulary=300, context=32), silent)
    meta = load_meta(folder)
    assert meta.vocabulary == 300
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    joined = dataset.SEPARATOR.join(content.decode() for _, content in text.files)
    for row in samples(folder, "val.ffr"):
        assert tokenizer.decode(row.tolist(), skip_special_tokens=False) in joined


@settings(max_examples=cases(50), deadline=None)
@given(st.text(max_size=60))
def test_the_bpe_is_byte_level_so_any_text_comes_back(text: str) -> None:
    tokenizer = train_bpe([b"def f(x): return x\n" * 20], 280)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if dataset.SEPARATOR not in text:
        assert tokenizer.decode(ids) == text
        assert 0 not in ids


def test_is_found_again_without_building(texts: Path, tmp_path: Path) -> None:
    told: Told = []
    first = prepare(read_text(texts), tmp_path / "data", BYTES, silent)
    again = prepare(read_text(texts), tmp_path / "data", BYTES, lambda *a: told.append(a))
    assert again == first
    assert told == []


def test_changed_text_or_settings_give_another(texts: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = prepare(read_text(texts), data, BYTES, silent)
    other = prepare(read_text(texts), data, Settings(tokens="bytes", context=8), silent)
    (texts / "m0.txt").write_text("x = 1\n" * 200)
    third = prepare(read_text(texts), data, BYTES, silent)
    assert len({first, other, third}) == 3


@pytest.mark.parametrize("damage", ["truncate", "overwrite", "remove", "meta"])
def test_a_damaged_one_is_built_anew(texts: Path, tmp_path: Path, damage: str) -> None:
    folder = prepare(read_text(texts), tmp_path / "data", BYTES, silent)
    before = (folder / "train.ffr").read_bytes()
    if damage == "truncate":
        (folder / "train.ffr").write_bytes(before[:-1])
    elif damage == "overwrite":
        (folder / "train.ffr").write_bytes(before[:-8] + b"\xff" * 8)
    elif damage == "remove":
        (folder / "val.ffr").unlink()
    else:
        (folder / "meta.json").write_text('{"tokens": 3}')
    notes: list[str] = []
    assert prepare(read_text(texts), tmp_path / "data", BYTES, silent, notes.append) == folder
    assert notes == [f"the data set {folder} is damaged; building it again"]
    assert prepare(read_text(texts), tmp_path / "data", BYTES, silent, notes.append) == folder
    assert len(notes) == 1
    assert (folder / "train.ffr").read_bytes() == before
    assert load_meta(folder).sums.keys() == {"train.ffr", "val.ffr"}


def test_an_interrupted_build_leaves_nothing(texts: Path, tmp_path: Path) -> None:
    def interrupt(_stage: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(read_text(texts), tmp_path / "data", BYTES, interrupt)
    assert list((tmp_path / "data").iterdir()) == []


def test_only_readable_utf8_text_is_taken(texts: Path) -> None:
    (texts / "image.bin").write_bytes(b"\x89PNG\0\xff")
    (texts / "latin.txt").write_bytes("für".encode("latin-1"))
    (texts / "nul.txt").write_bytes(b"a\0b")
    (texts / "blank.txt").write_bytes(b" \n")
    (texts / ".hidden.txt").write_text("hidden")
    (texts / ".git").mkdir()
    (texts / ".git" / "config").write_text("hidden")
    (texts / "gone.txt").symlink_to(texts / "nowhere")
    assert sorted(name for name, _ in read_text(texts).files) == [f"m{i}.txt" for i in range(8)]


def test_no_folder_no_file_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        read_text(tmp_path / "missing")
    with pytest.raises(ConfigError, match="it holds no file"):
        read_text(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"\0\1\2")
    with pytest.raises(ConfigError, match="none of its 1 files is UTF-8 text"):
        read_text(tmp_path)


def test_too_little_text_says_how_much_is_needed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a few words\n" * 20)
    with pytest.raises(ConfigError, match=r"gives 14 samples of 16 tokens; at least 64 are needed"):
        prepare(read_text(tmp_path), tmp_path / "data", BYTES, silent)
    assert list((tmp_path / "data").iterdir()) == []


def test_text_beyond_the_limit_is_left_out(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (texts / "m0.txt").stat().st_size
    monkeypatch.setattr(dataset, "TEXT_LIMIT", 3 * size + size // 2)
    text = read_text(texts)
    assert (len(text.files), text.left_out) == (3, 5)


def test_the_standard_library_comes_without_its_tests() -> None:
    text = read_text(None)
    names = {name for name, _ in text.files}
    assert "argparse.py" in names
    assert "asyncio/tasks.py" in names
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages"}
    assert all(name.endswith(".py") for name in names)
    assert text.left_out == 0


@given(st.integers(0, 300), st.integers(1, 40))
def test_samples_share_one_token_with_their_neighbour(length: int, context: int) -> None:
    stream = np.arange(length, dtype=np.uint16)
    rows = cut(stream, context)
    assert rows.shape == (max(0, length - 1) // context, context + 1)
    for number, row in enumerate(rows):
        assert row.tolist() == list(range(number * context, (number + 1) * context + 1))
