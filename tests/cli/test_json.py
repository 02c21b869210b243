"""`--json`: which verbs have it, and what they print with it."""

import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from tests.cli.conftest import Running, Shell
from tests.haiprof.profiles import rank

from fireflyer.cli.app import app, run_line
from fireflyer.fs3.client.discovery import announce
from fireflyer.fs3.config import embed
from fireflyer.fs3.process import ALL, Process
from fireflyer.haiprof.attach import enable
from fireflyer.haiprof.records import StepRecord
from fireflyer.program import current_json_form

NOTHING = "prints no result"
BYTES = "writes bytes as they are"
SERVES = "serves until it is ended"
SCRIPT = "stdout belongs to the script"
PROGRAM = "a program of its own, with its own options"
WITHOUT = {
    **dict.fromkeys(["down", "drain", "undrain", "window remove"], NOTHING),
    **dict.fromkeys([f"fs {verb}" for verb in ("put", "get", "cp", "mv", "rm", "mkdir")], NOTHING),
    **dict.fromkeys(["fs umount", "kv put", "kv delete"], NOTHING),
    **dict.fromkeys(["logs", "record cat", "fs cat", "kv get", "completion"], BYTES),
    **dict.fromkeys(["up", "fs up", "fs mount", "validate listen", "prof top"], SERVES),
    **dict.fromkeys(["prof run", "prof trace"], SCRIPT),
    **dict.fromkeys(["demo", "bench", "plan", "lab", "fs bench"], PROGRAM),
}
"""Verbs without `--json`, and the reason."""

STREAMS = ("events -f", "stop", "suspend", "resume", "kv scan")
"""Verbs that print an object a line, as soon as it is known."""

KEY = re.compile("[a-z][a-z0-9_]*")
"""Form of a key of a result."""

PLATFORM = """
    ps --all
    show t1
    events t1
    why t1
    nodes
    top
    faults
    ledger t1
    ledger --cluster
    run -d --json --workspace code code/train.py
    why t2
    suspend t2
    resume t2
    workspace list
    workspace show t2
    workspace pull t2 copy
    workspace prune
    stop t2
    window add n0 --from 1h --until 2h
    window list
    user add ada
    user disable ada
    user enable ada
    user list
    group add vision
    group join vision ada
    group list
    group leave vision ada
    token create ada
    token list
    token revoke TOKEN
    quota set --user ada --gpus 4
    quota list
    audit
    dashboard
    validate node n0
    validate node n0 --history
    config show
    config path
"""
FILE_SYSTEM = "ls /, stat /, du, find /, status, check /, scrub, scrub --now"
FILES = """
    record pack text.jsonl -o a.ffr
    record ls a.ffr
    record verify a.ffr
    record merge a.ffr a.ffr -o b.ffr
    record split b.ffr -o parts --count 1
    record convert a.ffr -o a.npy --to npy
    ckpt import model.safetensors runs --step 1
    ckpt import model.safetensors runs --step 2 --force
    ckpt ls runs
    ckpt inspect runs
    ckpt verify runs
    ckpt diff runs 1 2
    ckpt export runs out.safetensors --to safetensors
    ckpt prune runs --keep 1
    kv stat db
    kv check db
    kv scan db
    kv compact db
    kv gc db
    kv cache stat cache
    kv cache check cache
    experts add models poet model.safetensors
    experts pack models
    experts ls models
    experts check models
    prof report profile
    prof compare profile profile
    prof recorders
    prof enable
    prof disable
    failures report --paper
    failures generate --nodes 10 --days 10 -o year.csv
    validate --list
    validate fleet fleet.csv
    net plan --preset fat-tree2
    net plan --compare
    net plan --compare --nodes 100
    net order --preset fat-tree2 --job hosts
    net export --preset fat-tree2 --to net
    net verify --preset fat-tree2
    net flows --preset fat-tree2 --nodes 4
    experts sim --experts 4 --requests 20 --streams zipf
    sim --generate philly:20 --nodes 4
"""


def verbs(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields each verb that can be called, with its command."""
    inner = getattr(command, "commands", {})
    if not inner or any("--json" in each.opts for each in command.params):
        yield " ".join(words), command
    for name, each in inner.items():
        yield from verbs(each, (*words, name))


COMMANDS = dict(verbs(typer.main.get_command(app)))


def test_every_verb_has_json_or_a_reason_to_have_none() -> None:
    flags = {
        name: each
        for name, command in COMMANDS.items()
        for each in command.params
        if "--json" in each.opts
    }
    assert COMMANDS.keys() - flags.keys() == WITHOUT.keys()
    assert {each.help for each in flags.values()} == {"Print JSON alone on stdout."}
    assert all(each.is_flag for each in flags.values())


def test_every_verb_with_json_is_run_here() -> None:
    lines = [*PLATFORM.split("\n"), *FILES.split("\n"), "run", "fs grow", "prof attach"]
    lines += [f"fs {line}" for line in FILE_SYSTEM.split(", ")]
    covered = {" ".join(line.split()[:count]) for line in lines for count in (1, 2, 3)}
    assert COMMANDS.keys() - WITHOUT.keys() - covered == set()


def printed(capsys: Any, line: str, code: int = 0) -> Any:
    """Runs a verb with `--json`, and returns the document that is alone on stdout.

    Of a stream it returns the list of its objects.
    """
    words = [*line.split(), "--json"][: None if "--json" not in line else -1]
    assert run_line(words) == code, (line, capsys.readouterr())
    out = capsys.readouterr().out
    documents = [json.loads(text) for text in out.splitlines()]
    if not line.startswith(STREAMS):
        assert len(documents) == 1, (line, out)
    for document in documents:
        for each in document if isinstance(document, list) else [document]:
            assert all(KEY.fullmatch(key) for key in each), (line, each)
    return documents if line.startswith(STREAMS) else documents[0]


def test_of_the_platform(
    shell: Shell,
    started: Callable[[Running], Running],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FIREFLYER_HOME", str(shell.home))
    monkeypatch.chdir(shell.folder)
    (shell.folder / "code").mkdir()
    shell.script("print('seen')", "code/train.py")
    started(shell.start("up", "--nodes", "1")).until("stderr", "Ctrl-C ends")
    assert run_line(["run", "--json", "code/train.py"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["state"] == "finished"
    assert "seen" in err
    assert run_line(["drain", "n0", "--reason", "test"]) == 0  # further tasks wait
    token = ""
    for line in PLATFORM.strip().splitlines():
        found = printed(capsys, line.strip().replace("TOKEN", token))
        if line.strip().startswith("token create"):
            token = found["view"]["id"]
        if line.strip() == "nodes":
            assert 0 < found[0]["free_memory_bytes"] == found[0]["memory_bytes"]
    assert printed(capsys, "stop t1", code=1) == [
        {"error": {"type": "TaskError", "message": "task t1 has already finished"}}
    ]
    missing = "no task 't9' here; `fireflyer ps --all` lists them"
    gone = {"task": "t9", "error": {"type": "NoSuchTask", "message": missing}}
    over = {"type": "TaskError", "message": "task t1 has already finished"}
    refused, stopped = printed(capsys, "stop t2 t9", code=1)
    assert (refused, stopped["id"], stopped["state"]) == (gone, "t2", "stopped")
    for verb in ("stop", "stop --wait"):
        assert printed(capsys, f"{verb} t1 t9", code=1) == [{"task": "t1", "error": over}, gone]
    assert printed(capsys, "validate node n7", code=1)["error"]["type"] == "NoSuchNode"
    assert run_line(["undrain", "n7"]) == 1
    assert capsys.readouterr().err.startswith("fireflyer: unknown node 'n7'")


def test_of_a_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = embed(tmp_path, None, None)
    with Process(config, ALL, config.nodes) as process:
        process.set_up()
        announce(tmp_path, process.manager)
        monkeypatch.setenv("FIREFLYER_FS", str(tmp_path))
        for line in FILE_SYSTEM.split(", "):
            printed(capsys, f"fs {line}")
        assert printed(capsys, "fs grow", code=1)["error"]["type"] == "ConfigError"
    assert printed(capsys, "fs ls", code=1)["error"]["type"] == "Unavailable"


def test_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    monkeypatch.setattr(enable, "pth_file", lambda: tmp_path / "prepared.pth")
    for key in ("a", "b"):
        assert run_line(["kv", "put", "db", key, "1"]) == 0
    for line in FILES.strip().splitlines():
        printed(capsys, line.strip())
    assert printed(capsys, "prof attach 0", code=1)["error"]["type"] == "ConfigError"


def write_inputs(folder: Path) -> None:
    """Writes the files that the verbs of FILES read."""
    (folder / "hosts").write_text("n1\nn0\n")
    (folder / "text.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    head = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    model = struct.pack("<Q", len(head)) + head + bytes(8)
    (folder / "model.safetensors").write_bytes(model)
    for name in ("cache", "models", "profile"):
        (folder / name).mkdir()
    profile = rank(0, steps=3)
    records = [profile.header, *(StepRecord(row=row) for row in profile.steps)]
    lines = [msgspec.json.encode(record) for record in records]
    (folder / "profile/rank0.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    rows = [f"n{node},memory,{value},more" for node in range(3) for value in (10.0, 10.1, 9.9)]
    (folder / "fleet.csv").write_text("\n".join(["node,check,value,better", *rows]) + "\n")


@pytest.mark.parametrize(
    ("line", "kind", "code"),
    [
        ("nodes --fly --json", "UsageError", 2),
        ("show --json", "UsageError", 2),
        ("validate --json", "UsageError", 2),
        ("net plan --json", "ConfigError", 1),
        ("net order --preset fat-tree2 --job missing --json", "ConfigError", 1),
        ("sim --json --trace missing", "FileNotFoundError", 1),
        ("run --json missing.py", "ConfigError", 1),
        ("run --json --fly x.py", "UsageError", 2),
        ("run --fly --json x.py", "UsageError", 2),
        ("run --name fly --json --fly x.py", "UsageError", 2),
        ("run --json", "UsageError", 2),
        ("run --json --name", "UsageError", 2),
        ("events t1 --json --limit", "UsageError", 2),
        ("ps --all=fly --json", "UsageError", 2),
        ("fly --json", "UsageError", 2),
        ("--fly --json", "UsageError", 2),
        ("fs fly / --json", "UsageError", 2),
        ("validate fly --json", "UsageError", 2),
        ("net --json", "UsageError", 2),
    ],
)
def test_an_error_is_an_object_and_a_line(
    line: str, kind: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(line.split()) == code
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert error == {"type": kind, "message": err.removeprefix("fireflyer: ").rstrip("\n")}


@pytest.mark.parametrize(
    "line",
    [
        "run missing.py --json",
        "run --fly missing.py --json",
        "run --fly -- --json",
        "run --fly --name --json missing.py",
        "--fly run missing.py --json",
        "prof --fly run missing.py --json",
        "prof run --fly --json missing.py",
        "fly -- --json",
        "fs cat --json",
    ],
)
def test_words_of_other_programs_ask_for_nothing(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(line.split()) != 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("sim --json", "sim --json"),
        ("sim --json --nodes 2", "sim --json --nodes 2"),
        ("sim --json -", "sim --json"),
        ("sim --json f --nodes 2", "sim --output f --nodes 2"),
        ("sim --json=f", "sim --output f"),
    ],
)
def test_the_old_form_of_sim_and_bench(given: str, meant: str) -> None:
    assert current_json_form(given.split()) == meant.split()
