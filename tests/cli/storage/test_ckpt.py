"""`fireflyer ckpt` as a command: what it prints, its exit codes, and what it leaves alone."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.formats import safetensors
from fireflyer.checkpoint.formats.interchange import export
from fireflyer.checkpoint.state.contents import InMemory
from fireflyer.cli.app import run_line
from fireflyer.errors import NoSpace
from fireflyer.storage import DirectoryStorage

VERBS = ["ls", "inspect", "verify", "diff", "export", "import", "prune"]
HEAVY = ["torch", "numpy", "rich", "msgspec", "fireflyer.checkpoint", "fireflyer.ffrecord"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with run/: steps 100, 200 and 300."""
    monkeypatch.chdir(tmp_path)
    manager = CheckpointManager("run")
    for step in (100, 200, 300):
        state = {
            "model": {"w": torch.full((4, 8), float(step)), "b": torch.tensor([1.0, float("nan")])},
            "layers": [torch.zeros(2), {"name": "x\x1b[31m"}],
            "step": step,
        }
        loss = abs(step - 200) / 100 + 0.5
        manager.save(step, state, per_rank={"rng": torch.ones(3)}, metrics={"loss": loss}).wait()
    return tmp_path


def ran(capsys: Any, line: str, code: int = 0) -> str:
    """What the command printed; nothing on stderr if it went well."""
    assert run_line(["ckpt", *line.split()]) == code
    out, err = capsys.readouterr()
    assert (err == "") == (code == 0 or bool(out)), err
    return str(out or err)


def damage(run: Path, step: int) -> None:
    path = next((run / "run").glob(f"step-*{step}/data*"))
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    script = f"""
import contextlib, io, sys
from fireflyer.cli.app import run_line
for verb in {VERBS!r}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run_line(["ckpt", verb, "--help"]) == 0
    assert f"fireflyer ckpt {{verb}} " in out.getvalue().partition("Options:")[0]
assert not [name for name in {HEAVY!r} if name in sys.modules], sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-P", "-c", script], check=True)


def test_ls(run: Path, capsys: Any) -> None:
    next((run / "run").glob("step-*100/data*")).unlink()
    lines = ran(capsys, "ls run").splitlines()
    assert lines[0].split() == [
        "STEP",
        "AGE",
        "SIZE",
        "RANKS",
        "TENSORS",
        "ATTEMPT",
        "STATE",
        "METRICS",
    ]
    assert lines[1].split()[0] == "300"
    assert lines[1].endswith("whole    loss=1.5")
    assert lines[3].split()[-2:] == ["damaged", "loss=1.5"]
    assert "is missing" in lines[4]
    found = json.loads(ran(capsys, "ls run --json"))
    assert [(one["step"], one["state"]) for one in found] == [
        (300, "whole"), (200, "whole"), (100, "damaged")
    ]  # fmt: skip
    assert found[0]["bytes"] == 128 + 8 + 8 + 12


def test_inspect(run: Path, capsys: Any) -> None:
    text = ran(capsys, "inspect run")
    assert text.startswith("step 300 in ")
    assert "\n    w                            float32 [4, 8]  128 B\n" in text
    assert "\x1b" not in text
    assert "name                       'x\\x1b[31m'" in text
    assert "per_rank[0]" in text
    text = ran(capsys, "inspect run 200 --tensors model.* --stats")
    assert "200 to 200, mean 200, std 0" in text
    assert "1 to 1, mean 1, std 0, 1 NaN" in text
    assert "layers" not in text
    found = {one["name"]: one for one in json.loads(ran(capsys, "inspect run --json --stats"))}
    assert found["model.w"]["stats"]["mean"] == 300.0
    assert found["model.w"]["shape"] == [4, 8]
    assert found["step"]["value"] == 300
    assert found["rng"]["of"] == "per_rank[0]"


def test_verify(run: Path, capsys: Any) -> None:
    assert ran(capsys, "verify run") == "3 checkpoints, 468 B read: all whole\n"
    damage(run, 200)
    text = ran(capsys, "verify run", 1)
    assert "step 200: " in text
    assert "(model.w)" in text
    assert text.endswith("3 checkpoints, 468 B read: 1 damaged\n")
    assert ran(capsys, "verify run 100 300").startswith("2 checkpoints")
    found = json.loads(ran(capsys, "verify run 200 --json", 1))
    assert [one["tensors"] for one in found["damages"]] == [["model.w"]]


def test_diff(run: Path, capsys: Any) -> None:
    text = ran(capsys, "diff run 100 200")
    assert "changed  model.w: float32 [4, 8]  max 100  relative 1\n" in text
    assert "changed  step: 100 -> 200\n" in text
    assert text.endswith("2 changed\n")
    assert ran(capsys, "diff run 100 200 --exit-code", 1) == text
    assert ran(capsys, "diff run 100 100 --exit-code") == "no difference\n"
    manager = CheckpointManager("other")
    manager.save(7, {"model": {"w": torch.full((4, 8), 100.0)}}).wait()
    found = json.loads(ran(capsys, "diff run 100 7 --in other --json"))
    assert {one["name"]: one["kind"] for one in found}["model.b"] == "removed"
    assert "model.w" not in {one["name"] for one in found}


@pytest.mark.parametrize(
    ("to", "out"),
    [("safetensors", "m.safetensors"), ("safetensors", "m"), ("dcp", "d"), ("torch", "t.pt")],
)
def test_export_and_import(run: Path, capsys: Any, to: str, out: str) -> None:
    assert ran(capsys, f"export run {out} --to {to} --step 200 --shard-size 100").startswith(
        "3 tensors, 144 B: "
    )
    assert ran(capsys, f"import {out} again --step 5") == "3 tensors, 144 B: step 5 in again\n"
    assert ran(capsys, "diff run 200 5 --in again") == "no difference\n"
    assert "already exists" in ran(capsys, f"export run {out} --to {to}", 1)
    ran(capsys, f"export run {out} --to {to} --force")
    assert "already has checkpoints of runs" in ran(capsys, f"import {out} again", 1)
    ran(capsys, f"import {out} again --step 6 --force")
    assert CheckpointManager("again").load()["step"] == 300
    assert not [name for name in run.rglob("*") if ".tmp" in name.name]


@pytest.mark.parametrize(
    ("to", "out", "behind"),
    [
        ("torch", "t.pt", "kept/old"),
        ("safetensors", "m.safetensors", "kept/old"),  # as in a cache of models
        ("safetensors", "m.safetensors", "kept/new.safetensors"),
        ("dcp", "d", "kept/folder"),
    ],
)
def test_export_through_a_link(run: Path, capsys: Any, to: str, out: str, behind: str) -> None:
    Path("kept").mkdir()
    Path("kept/old").write_text("before")
    if to == "dcp":
        ran(capsys, f"export run {behind} --to dcp --step 100")
    Path(out).symlink_to(behind)
    ran(capsys, f"export run {out} --to {to} --step 200 --force")
    assert os.readlink(out) == behind
    assert ran(capsys, f"import {out} again --step 5") == "3 tensors, 144 B: step 5 in again\n"
    assert ran(capsys, "diff run 200 5 --in again") == "no difference\n"
    assert {path.name for path in Path("kept").iterdir()} == {"old", Path(behind).name}


@pytest.mark.parametrize(("to", "out"), [("torch", "t.pt"), ("safetensors", "m.safetensors")])
def test_export_to_a_fifo_is_refused(run: Path, capsys: Any, to: str, out: str) -> None:
    os.mkfifo(out)
    assert "is a pipe or a device, not a file" in ran(capsys, f"export run {out} --to {to}", 1)
    assert Path(out).is_fifo()


def test_export_a_part(run: Path, capsys: Any) -> None:
    found = json.loads(ran(capsys, "export run m.safetensors --to safetensors --root model --json"))
    assert found == {"files": ["m.safetensors"], "tensors": 2, "bytes": 136}
    assert list(safetensors.load("m.safetensors")) == ["w", "b"]


def test_prune(run: Path, capsys: Any) -> None:
    text = "would remove step 100\nwould remove 1 of 3; kept: 300, 200\n"
    assert ran(capsys, "prune run --keep 2 --dry-run") == text
    assert CheckpointManager("run").steps() == [100, 200, 300]
    found = ran(capsys, "prune run --keep 1 --best 1 --metric loss")
    assert found == "removed step 100\nremoved 1 of 3; kept: 300, 200\n"
    assert json.loads(ran(capsys, "prune run --keep 1 --json")) == {
        "removed": [200], "kept": [300], "dry_run": False
    }  # fmt: skip
    assert ran(capsys, "prune run --keep 1") == "removed 0 of 1; kept: 300\n"
    assert sorted(path.name for path in (run / "run").iterdir()) == ["claims", "step-000000000300"]


def test_prune_counts_what_is_whole(run: Path, capsys: Any) -> None:
    damage(run, 300)
    assert run_line(["ckpt", "prune", "run", "--keep", "1", "--verify"]) == 0
    out, err = capsys.readouterr()
    assert out == "removed step 100\nremoved 1 of 2; kept: 200\n"
    assert "step 300 is damaged and stays" in err
    next((run / "run").glob("step-*200/data*")).unlink()
    next((run / "run").glob("step-*300/data*")).unlink()
    assert ran(capsys, "prune run --keep 1") == "removed 0 of 0; kept: none\n"
    assert len(list((run / "run").glob("step-*/manifest*"))) == 2


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("ls absent", 1, "directory absent does not exist"),
        ("verify run 7", 1, "there is no checkpoint of step 7"),
        ("inspect run 7", 1, "there is no checkpoint of step 7"),
        ("inspect run --tensors nothing*", 1, "matches nothing*"),
        ("diff run 100", 2, "Missing argument 'B'"),
        ("export run out --to zip", 2, "--to 'zip': expected one of safetensors, dcp, torch"),
        ("export run out", 2, "Missing option '--to'"),
        (
            "export run out --to safetensors --shard-size 5X",
            2,
            "--shard-size '5X': expected e.g. 500M",
        ),
        ("export run out --to dcp --root step", 1, "no dict or list 'step'"),
        ("export run absent/out --to dcp", 1, "its folder does not exist"),
        ("import absent again", 1, "absent does not exist"),
        ("import run again", 1, "has neither .metadata nor a .safetensors file"),
        (
            "export run out --to safetensors --shard-size 0",
            2,
            "--shard-size '0': expected e.g. 500M",
        ),
        ("prune run --keep 0", 2, "Invalid value for '--keep'"),
        ("prune run --keep 1 --best 2", 2, "--best requires --metric NAME: give both"),
        ("prune run --keep 1 --metric loss", 2, "--metric requires --best N: give both"),
        ("prune run --keep 1 --best 2 --metric loss --mode big", 2, 'expected "min" or "max"'),
        ("prune run --keep 1 --best 2 --metric zz", 1, "no checkpoint has the metric zz"),
    ],
)
def test_errors_are_one_line(run: Path, capsys: Any, line: str, code: int, message: str) -> None:
    text = ran(capsys, line, code)
    assert message in text
    assert text.count("\n") == 1
    assert sorted(path.name for path in run.iterdir()) == ["run"]


def test_alone_it_shows_its_verbs(capsys: Any) -> None:
    out = ran(capsys, "", 2)
    assert out.startswith("Usage: fireflyer ckpt ")
    assert all(f"  {verb} " in out for verb in VERBS)


def test_an_empty_directory_is_refused(run: Path, capsys: Any) -> None:
    for line in (["ls", ""], ["import", "run", ""]):
        assert run_line(["ckpt", *line]) == 2
        assert "DIR is empty" in capsys.readouterr().err


class Code:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.system, ("touch ran",))


@pytest.mark.parametrize("verb", ["ls", "verify", "inspect", "prune --keep 1"])
def test_a_directory_of_something_else_is_refused(run: Path, capsys: Any, verb: str) -> None:
    safetensors.save({"w": torch.ones(3)}, run / "model")
    name, *options = verb.split()
    assert "no run has saved in model" in ran(capsys, " ".join([name, "model", *options]), 1)
    refusal = ran(capsys, " ".join([name, ".", *options]), 1)
    assert "a folder below has: " in refusal
    assert "names the folder of a task" in ran(capsys, " ".join([name, "t4", *options]), 1)
    (run / "model" / "claims").mkdir()
    if name == "ls":
        ran(capsys, "ls model")  # a run that has not saved yet


def test_code_in_a_file_is_refused_in_our_words(run: Path, capsys: Any) -> None:
    torch.save({"a": Code()}, "code.pt")
    warnings.simplefilter("ignore", UserWarning)  # that there is one process
    dcp.save({"a": torch.ones(3)}, checkpoint_id="dcp", no_dist=True)
    [data] = Path("dcp").glob("*.distcp")
    data.write_bytes(data.read_bytes().replace(b"torch", b"tarch"))
    for source, reason in (
        ("code.pt", "it names posix.system, which is not data"),
        ("dcp", "tarch"),
    ):
        text = ran(capsys, f"import {source} new-{source}", 1)
        assert text.count("\n") == 1
        assert reason in text
        assert "weights_only" not in text
        assert "\x1b" not in text
    assert not Path("ran").exists()


def test_a_full_disk_under_export_to_torch(run: Path) -> None:
    storage = DirectoryStorage(run / "full")
    (run / "full" / ".x.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(NoSpace, match=r"cannot write .*x\.pt: No space left"):
        export(InMemory({"a": torch.ones(1000)}), run / "full" / "x.pt", "torch")
    assert storage.list() == []
