"""Results take their place whole; nothing else is replaced, and nothing of a dead writer stays."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fireflyer.errors import ConfigError, NoSpace, StorageError
from fireflyer.ffrecord import FileReader, FileWriter
from fireflyer.ffrecord.convert import atomic_output, exporters, repack
from fireflyer.ffrecord.convert.atomic_output import NewFolder, exchange, write_atomically
from fireflyer.ffrecord.convert.detect import open_source
from fireflyer.ffrecord.convert.formats.records import RecordSource
from fireflyer.ffrecord.convert.record_writer import Plan
from fireflyer.ffrecord.output import Output


def quiet(samples: int, held: int) -> None:
    """Progress that nobody sees."""


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """all.ffr of 6 samples; the folder around it is the current one."""
    monkeypatch.chdir(tmp_path)
    with FileWriter("all.ffr", 6) as writer:
        for number in range(6):
            writer.write_one(b"%d" % number)
    return tmp_path


def split(source: str, out: str, per_file: int = 3) -> None:
    plan = Plan(out=Path(out), per_file=per_file, force=True)
    repack.pack(RecordSource(source), plan, 1, quiet)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


def killed(body: Callable[[], object]) -> None:
    """Runs `body` in a child, which kills itself in it."""
    child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def die(*_: object) -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return False


@pytest.mark.parametrize(
    ("made", "source", "out", "message"),
    [
        ("d/keep.txt", "all.ffr", "d", "contains 'keep.txt', which this command does not write"),
        ("d/PART_00000.ffr/deep", "all.ffr", "d", "contains 'PART_00000.ffr', which this"),
        ("d/train.ffr", "all.ffr", "d", "contains 'train.ffr'"),
        ("d/PART_00000.ffr", "all.ffr", ".", "the current folder or encloses it"),
        ("d/PART_00000.ffr", "all.ffr", "..", "the current folder or encloses it"),
        ("d/PART_00000.ffr", "d/all.ffr", "d", "contains the source d/all.ffr"),
        ("d/e/PART_00000.ffr", "d", "d/e", "contains the source d or is inside it"),
    ],
)
def test_force_replaces_no_folder_that_holds_anything_else(
    plain: Path, made: str, source: str, out: str, message: str
) -> None:
    path = plain / made
    path.parent.mkdir(parents=True)
    path.write_bytes(b"precious")
    if source == "d/all.ffr":
        os.rename("all.ffr", source)
    before = tree(plain)
    if source == "d":
        plan = Plan(out=Path(out), per_file=3, force=True)
        with pytest.raises(ConfigError, match=message):
            repack.pack(open_source([source], "folder"), plan, 1, quiet)
    else:
        with pytest.raises(ConfigError, match=message):
            split(source, out)
    assert tree(plain) == before


def test_what_comes_into_the_folder_meanwhile_stays(plain: Path) -> None:
    split("all.ffr", "parts")

    def disturbed() -> None:
        with NewFolder(Path("parts"), force=True) as folder:
            (folder.path / "PART_00000.ffr").write_bytes(b"")
            (plain / "parts" / "new").write_bytes(b"precious")

    with pytest.raises(ConfigError, match="contains 'new'"):
        disturbed()
    assert (plain / "parts" / "new").read_bytes() == b"precious"
    assert sorted(os.listdir()) == ["all.ffr", "parts"]


def test_a_link_to_a_folder_stays_a_link(plain: Path) -> None:
    (plain / "real").mkdir()
    (plain / "link").symlink_to("real")
    for per_file in (3, 2):
        split("all.ffr", "link", per_file)
        assert (plain / "link").is_symlink()
        assert len(os.listdir("real")) == 6 // per_file


def test_a_kill_around_the_exchange_leaves_the_old_folder_or_the_new(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split("all.ffr", "parts", 3)
    if not exchange(plain / "parts", plain / "all.ffr"):
        pytest.skip("no RENAME_EXCHANGE here")
    exchange(plain / "parts", plain / "all.ffr")
    for name, left in (("exchange", 2), ("sync_directory", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(atomic_output, name, die)
            killed(lambda: split("all.ffr", "parts", 2))
        assert len(os.listdir("parts")) == left
        assert FileReader("parts").n == 6
        split("all.ffr", "parts", 3)
        assert sorted(os.listdir()) == ["all.ffr", "parts"]


def test_without_exchange_a_kill_between_the_renames_is_mended_by_the_next_run(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_output, "exchange", lambda one, other: False)
    split("all.ffr", "parts", 3)
    old = tree(plain / "parts")
    rename = Path.rename

    def second_dies(path: Path, target: Path) -> Path:
        return rename(path, target) if path.name == "parts" else Path(str(die()))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", second_dies)
        killed(lambda: split("all.ffr", "parts", 2))
    assert not os.path.exists("parts")
    with (
        pytest.raises(ConfigError, match="already exists"),
        NewFolder(Path("parts")),
    ):
        pass
    assert tree(plain / "parts") == old
    split("all.ffr", "parts", 2)
    assert len(os.listdir("parts")) == 3
    assert sorted(os.listdir()) == ["all.ffr", "parts"]


@pytest.mark.parametrize("version", [1, 2])
def test_the_next_writer_removes_what_a_dead_one_left(plain: Path, version: int) -> None:
    def half() -> None:
        writer = FileWriter("a.ffr", version=version)
        second = FileWriter("a.ffr", version=version)
        for each in (writer, second):
            each.write_one(b"x" * (2 << 20))
        die()

    killed(half)
    assert len(os.listdir()) == 3
    living = FileWriter("a.ffr", version=version)
    living.write_one(b"y")
    with FileWriter("a.ffr", version=version) as writer:
        writer.write_one(b"x")
    living.close()
    assert FileReader("a.ffr").read_one(0).tobytes() == b"y"
    assert sorted(os.listdir()) == ["a.ffr", "all.ffr"]


def test_the_next_folder_or_export_removes_what_a_dead_one_left(plain: Path) -> None:
    def half() -> None:
        with NewFolder(Path("parts")) as folder:
            (folder.path / "PART_00000.ffr").write_bytes(b"x")
            die()

    def fill(path: Path) -> None:
        path.write_bytes(b"half")
        die()

    killed(half)
    killed(lambda: write_atomically(Path("a.tar"), fill))
    assert len(os.listdir()) == 3
    split("all.ffr", "parts")
    exporters.export(RecordSource("all.ffr"), "tar", Path("a.tar"), False, quiet)
    assert sorted(os.listdir()) == ["a.tar", "all.ffr", "parts"]


def test_who_was_swept_before_its_lock_begins_anew(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fireflyer.ffrecord import output

    real, seen = output.new_file, []

    def swept(path: str) -> int:
        fd = real(path)
        seen.append(path)
        if len(seen) == 1:
            assert output.sweep(path)
        return fd

    monkeypatch.setattr(output, "new_file", swept)
    file = Output.temporary("b.ffr")
    file.write([b"x"], 0)
    assert not output.sweep(file.path)
    file.publish()
    file.close()
    assert len(seen) == 2
    assert (plain / "b.ffr").read_bytes() == b"x"


def test_errors_name_the_folder_that_was_asked_for(plain: Path) -> None:
    folder = NewFolder(Path("parts"))

    def fails(error: type[Exception], *more: object) -> None:
        with folder:
            raise error(*more, f"cannot write {folder.path}/PART_00000.ffr")

    with pytest.raises(StorageError) as told:
        fails(StorageError)
    assert str(told.value) == "cannot write parts/PART_00000.ffr"
    with pytest.raises(NoSpace) as full:
        fails(OSError, errno.ENOSPC, "no space")
    assert str(full.value) == "cannot write parts: no space"
    assert os.listdir() == ["all.ffr"]


def test_arrays_of_any_source_and_a_full_disk(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plain / "a.jsonl").write_text("\n".join(f'{{"n": {i}}}' for i in range(1000)))
    source = open_source(["a.jsonl"])
    source.length = None
    exporters.export(source, "npy", Path("arrays"), False, quiet)
    np.testing.assert_array_equal(np.load("arrays/n.npy", "r"), np.arange(1000))

    def full(path: Path, mode: str, buffering: int) -> object:
        return open("/dev/full", mode, buffering)

    monkeypatch.setattr(exporters, "open", full, raising=False)
    with pytest.raises(NoSpace, match="cannot write more"):
        exporters.export(open_source(["a.jsonl"]), "npy", Path("more"), False, quiet)
    assert sorted(os.listdir()) == ["a.jsonl", "all.ffr", "arrays"]
