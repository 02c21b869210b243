"""`fireflyer bench checkpoint` with a small state: rows and what is compared, never how fast."""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fireflyer.bench.__main__ import app
from fireflyer.bench.checkpoint import benchmark as checkpoint
from fireflyer.bench.checkpoint import cases, jobs, limits
from fireflyer.bench.checkpoint import state as states
from fireflyer.bench.checkpoint.context import Place, Spec
from fireflyer.bench.checkpoint.limits import Memcpy, RawFile
from fireflyer.bench.harness import options
from fireflyer.errors import CheckpointError, PeerLost
from fireflyer.program import run_app

MIB = 1 << 20
SIZE = 16 * MIB
BEFORE_THE_STEPS = ("stall", "total", "load", "memory")
FAKE_SAFETENSORS = """
import torch
def save_file(tensors, path):
    torch.save(tensors, path)
def load_file(path, backend="mmap"):
    assert backend in ("mmap", "pread")
    with open(path, "rb") as file:
        return torch.load(file)
"""


def run(works: list[Path], report: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    line = ["checkpoint", "--size", "16MiB", "--rounds", "1", "--output", str(report)]
    line += [part for work in works for part in ("--work", str(work))]
    code = run_app(app, "fireflyer bench", [*line, *more])
    return code, json.loads(report.read_text())["rows"] if report.exists() else []


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """One folder on tmpfs and one elsewhere."""
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    found = [memory / "work", tmp_path_factory.mktemp("checkpoint") / "work"]
    if Place.of(found[1]).in_memory:
        pytest.skip("temporary files are on tmpfs here")
    yield found
    shutil.rmtree(memory)


@pytest.fixture(scope="module")
def rows(works: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The groups that need no step of a job, with a stand-in for safetensors."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "safetensors").mkdir()
    (folder / "safetensors" / "__init__.py").write_text("")
    (folder / "safetensors" / "torch.py").write_text(FAKE_SAFETENSORS)
    (folder / "safetensors-9.9.dist-info").mkdir()
    (folder / "safetensors-9.9.dist-info" / "METADATA").write_text(
        "Name: safetensors\nVersion: 9.9\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        code, found = run(works, folder / "report.json", "--only", ",".join(BEFORE_THE_STEPS))
    for name in ("safetensors.torch", "safetensors"):
        sys.modules.pop(name, None)
    assert code == 0
    return found


@pytest.mark.full
def test_every_group_gives_its_rows(rows: list[dict[str, Any]]) -> None:
    assert Counter(row["case"] for row in rows) == {
        "stall of a save, 16 MiB, tmpfs": 2,
        "stall of a save, 16 MiB, disk": 2,
        "save until durable, 16 MiB, tmpfs": 4,
        "save until durable, 16 MiB, disk": 5,
        "warm load(into=), 16 MiB, tmpfs": 3,
        "warm load(), 16 MiB, tmpfs": 3,
        "cold load(into=), 16 MiB, disk": 3,
        "cold load(), 16 MiB, disk": 3,
        "memory of a save / state, 16 MiB, disk": 1,
        "memory of load(into=), 16 MiB, disk": 1,
    }
    for row in rows:
        assert row["rounds"] == 1
        assert row["ours"] > 0
        assert row["ratio"] == pytest.approx(row["peer_value"] / row["ours"])


@pytest.mark.full
def test_what_is_asked_is_asked_of_the_right_rows(rows: list[dict[str, Any]]) -> None:
    asked = {
        (row["case"].replace(", 16 MiB", ""), row["peer"].split(" by ")[0].split(", 2")[0]): row[
            "goal"
        ]
        for row in rows
        if row["goal"] is not None
    }
    threads = f"memcpy, {len(os.sched_getaffinity(0))} threads".split(", 2")[0]
    stager = "dcp.async_save, reused stager"
    assert asked == {
        ("stall of a save, tmpfs", threads): pytest.approx(1 / 1.15),
        ("stall of a save, disk", threads): pytest.approx(1 / 1.15),
        ("stall of a save, tmpfs", stager): 2.2,
        ("stall of a save, disk", stager): 2.2,
        ("save until durable, disk", "O_DIRECT"): 0.75,
        ("cold load(into=), disk", "O_DIRECT"): 0.85,
        ("cold load(into=), disk", "dcp.load"): 1.6,
        ("warm load(into=), tmpfs", "dcp.load"): 5,
        ("warm load(into=), tmpfs", "load_file, copied"): 0.8,
        ("warm load(), tmpfs", 'load_file(backend="pread")'): 0.8,
        ("memory of a save / state, disk", "asked: at most"): 1,
        ("memory of load(into=), disk", "asked: at most"): 1,
    }


@pytest.mark.full
def test_peers_are_those_of_the_issue(rows: list[dict[str, Any]]) -> None:
    saved = {row["peer"] for row in rows if row["case"].startswith("save until durable")}
    assert {
        "dcp.save", "dcp.async_save, reused stager", "torch.save and fsync", "safetensors 9.9 and fsync",
    } < saved  # fmt: skip
    loaded = {row["peer"] for row in rows if row["case"].startswith("cold load()")}
    assert loaded == {
        "torch.load", 'load_file(backend="pread")', "load_file, mapped, touched",
    }  # fmt: skip


@pytest.mark.full
def test_nothing_is_left_where_it_worked(rows: list[dict[str, Any]], works: list[Path]) -> None:
    assert rows
    assert [list(work.iterdir()) for work in works] == [[], []]


def test_the_rows_of_jobs_and_of_one_tensor(works: list[Path], tmp_path: Path) -> None:
    code, rows = run(works, tmp_path / "report.json", "--only", "overlap,one")
    assert code == 0
    assert [(row["case"], row["peer_value"], row["goal"]) for row in rows] == [
        ("overlapped save, 16 MiB, tmpfs", 10, 1),
        ("overlapped save, 16 MiB, disk", 10, 1),
        ("1 MiB tensor, warm, 16 MiB, tmpfs", 20, 1),
    ]


def test_a_job_on_all_cores_with_and_without_saves(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    spec = Spec(size=4 * MIB, work=(tmp_path,), only=("training",), rounds=1, every_s=0.1)
    (row,) = checkpoint.run(spec, lambda text: None)
    assert (row.unit, row.peer, row.goal) == ("steps/s", "no saves", 0.98)
    assert row.ratio == pytest.approx(row.ours / (row.peer_value or 0))
    assert torch.get_num_threads() == threads
    assert list(tmp_path.iterdir()) == []


def test_without_safetensors_the_rows_say_so(
    works: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    code, rows = run(works[:1], tmp_path / "report.json", "--only", "total,load")
    assert code == 0
    missing = [row["case"] for row in rows if row["peer"] == "safetensors is not installed"]
    assert missing == [
        f"{what}, 16 MiB, tmpfs"
        for what in ("save until durable", "warm load(into=)", "warm load()")
    ]


def test_a_load_of_other_bytes_ends_the_run(
    works: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def nothing(self: object, state: states.State) -> cases.Loaded:
        return cases.Loaded(1.0, state)

    monkeypatch.setattr(cases.Dcp, "load_into", nothing)
    code, rows = run(works[:1], tmp_path / "report.json", "--only", "load")
    assert (code, rows) == (1, [])
    assert "differ from the saved bytes" in capsys.readouterr().err
    assert list(works[0].iterdir()) == []


class FakeManager:
    """Saves by taking the values when `save` is called, or (late) when the save is waited for."""

    late = False
    calls: ClassVar[list[str]] = []

    def __init__(self, folder: Path, *, overlap: bool, keep: int) -> None:
        assert overlap

    def save(self, step: int, state: states.State) -> "FakeManager":
        self.calls.append(f"save {step}")
        self._state = state
        self._saved = {} if self.late else {n: t.clone() for n, t in states.flat(state)}
        return self

    def before_step(self) -> None:
        self.calls.append("before_step")

    def wait(self) -> None:
        if self.late:
            self._saved = {name: tensor.clone() for name, tensor in states.flat(self._state)}

    def load(self) -> states.State:
        return self._saved


@pytest.mark.parametrize("late", [False, True])
def test_an_overlapped_save_must_hold_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(FakeManager, "calls", calls)
    monkeypatch.setattr(FakeManager, "late", late)
    monkeypatch.setattr(jobs, "CheckpointManager", FakeManager)
    monkeypatch.setattr(jobs, "STEP_S", 0.0)
    job = jobs.Overlapped(tmp_path, states.gpt_state(4 * MIB))
    if late:
        with pytest.raises(CheckpointError, match=r"step 0 holds wrong values in model\.wpe"):
            job.step()
        return
    assert job.step() > 0
    assert job.step() > 0
    assert calls == ["save 0", "before_step", "save 1", "before_step"]


def test_the_state_is_of_the_size_and_always_the_same() -> None:
    state = states.gpt_state(SIZE)
    tensors = dict(states.flat(state))
    assert len(tensors) == states.TENSORS
    assert 0.97 * SIZE < states.bytes_of(state) <= SIZE
    assert tensors[states.ONE].nbytes == states.ONE_BYTES
    assert states.checksums(state) == states.checksums(states.gpt_state(SIZE))
    before = states.checksums(state)
    states.erase(state)
    assert not any(bool(tensor.any()) for tensor in tensors.values())
    assert states.checksums(state) != before


def test_memcpy_copies_by_all_cores_until_its_process_ends() -> None:
    with Memcpy(3 * MIB + 5) as memcpy:
        assert memcpy.title == f"memcpy, {len(os.sched_getaffinity(0))} threads"
        assert memcpy() > 0
        assert memcpy() > 0
        os.kill(memcpy.pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match="process that copies memory ended"):
            memcpy()


@pytest.mark.parametrize("fio", [True, False])
def test_raw_files_are_written_whole_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fio: bool
) -> None:
    if fio and shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    if not fio:
        monkeypatch.setenv("PATH", "")
    raw = RawFile(tmp_path / "raw", 5 * MIB + 1)
    assert raw.title == ("O_DIRECT by fio" if fio else "O_DIRECT by 16 threads")
    assert raw.write() > 0
    assert raw.path.stat().st_size == 6 * limits.BLOCK
    assert raw.read() > 0
    raw.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "hot"],
        ["--size", "1M"],
        ["--size", "16M,32M"],
        ["--size", "4MB"],
        ["--rounds", "0"],
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run_app(app, "fireflyer bench", ["checkpoint", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_groups_and_options_name_the_same() -> None:
    assert tuple(checkpoint.GROUPS) == options.CHECKPOINT
    assert tuple(g for g in options.CHECKPOINT if g != "training") == options.CHECKPOINT_DEFAULT


def test_sizes_with_units() -> None:
    assert options.size_text(1 << 30) == "1 GiB"
