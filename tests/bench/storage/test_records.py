"""`fireflyer bench records` at a tiny scale: real numbers, peers that are missing shown as missing."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fireflyer.bench.__main__ import app
from fireflyer.bench.harness import goals
from fireflyer.bench.records import benchmark as records
from fireflyer.bench.records import cases as records_cases
from fireflyer.bench.records import peers as records_peers
from fireflyer.bench.records.data import DataSet, order
from fireflyer.errors import ConfigError, PeerLost
from fireflyer.ffrecord import FileReader
from fireflyer.program import run_app

STAND_IN = """
import json, sys, time
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "hello":
        reply = {"version": "1.2", "views": False, "verifies": True, "sequential": False}
    elif command["do"] == "prepare":
        reply = {"bytes": 1}
    else:
        reply = {"seconds": 0.5, "bytes": 1}
    print(json.dumps(reply), flush=True)
"""


def run(tmp_path: Path, *more: str) -> tuple[int, Path]:
    report = tmp_path / "report.json"
    arguments = ["records", "--work", str(tmp_path / "work"), "--scale", "0.001", "--rounds", "2"]
    return run_app(app, "fireflyer bench", [*arguments, "--output", str(report), *more]), report


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every group without any peer."""
    code, report = run(tmp_path_factory.mktemp("records"))
    assert code == 0
    found = json.loads(report.read_text())
    assert found["bench"] == "records"
    return list(found["rows"])


@pytest.mark.full
def test_every_group_gives_rows(rows: list[dict[str, Any]]) -> None:
    cases = {row["case"].split(",")[0].split(" of ")[0] for row in rows}
    assert cases == {
        "warm 64 KiB", "warm 64 KiB views", "warm 1 KiB", "cold 64 KiB", "DataLoader", "DataLoader 1 KiB",
        "warm loader", "cold loader", "packing 0.002 GiB", "warm open + batch", "cold open + batch",
    }  # fmt: skip
    for row in rows:
        assert row["ours"] > 0
        assert row["rounds"] == 2
        if row["peer_value"] is not None:
            assert row["ratio"] == pytest.approx(row["peer_value"] / row["ours"])


@pytest.mark.full
@pytest.mark.parametrize("case", ["warm 64 KiB", "warm 1 KiB", "cold 64 KiB"])
def test_loose_files_are_measured_and_missing_peers_are_shown(
    rows: list[dict[str, Any]], case: str
) -> None:
    found = {row["peer"]: row for row in rows if row["case"] == case}
    assert found["loose files"]["ratio"] > 0
    for name in records_peers.REQUIRES:
        row = found[f"{name} is not installed"]
        assert (row["peer_value"], row["ratio"], row["goal"]) == (None, None, None)
    if case.startswith("warm"):
        assert found["memcpy"]["of_bound"] == found["memcpy"]["ratio"]


@pytest.mark.full
def test_the_goals_are_those_that_are_asked_for(rows: list[dict[str, Any]]) -> None:
    goal_of = {(row["case"].split(" of ")[0], row["peer"]): row["goal"] for row in rows}
    assert goal_of["warm 64 KiB", "memcpy"] == 0.6
    for name in ("DataLoader", "DataLoader 1 KiB"):
        assert goal_of[f"{name}, in process", "one by one"] == 5
        assert goal_of[f"{name}, 2 workers", "one by one"] == 5
    loaders = [goal_of["cold loader", f"files, {how}"] for how in ("in process", "2 workers")]
    assert sorted(loaders, key=str) == [3, None]
    assert goals.records("cold 64 KiB", "fio") == 1.2


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str = STAND_IN) -> Path:
    """A folder of environments in which lmdb is a script of this test."""
    worker = tmp_path / "worker.py"
    worker.write_text(text)
    monkeypatch.setattr(records_peers, "WORKER", worker)
    python = records_peers.python_of(tmp_path / "peers", "lmdb")
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return tmp_path / "peers"


def test_a_peer_is_asked_by_lines_and_gets_the_goal_as_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = stand_in(tmp_path, monkeypatch)
    code, report = run(tmp_path, "--only", "warm", "--peers", str(peers))
    assert code == 0
    found = {row["peer"]: row for row in json.loads(report.read_text())["rows"]}
    row = found["lmdb 1.2, verified"]
    assert (row["goal"], row["rounds"]) == (3, 2)
    assert row["peer_value"] == pytest.approx(0.5 / 512 * 1e6)
    assert "pylance is not installed" in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit(3)", "peer lmdb ended"),
        ('import sys\nprint(\'{"error": "no luck"}\', flush=True)\nsys.stdin.read()', "no luck"),
    ],
)
def test_a_peer_that_does_not_start_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    folder = stand_in(tmp_path, monkeypatch, text)
    with records_peers.started(folder, ["lmdb", "webdataset"]) as (peers, missing):
        assert peers == []
        assert message in missing["lmdb"]
        assert missing["webdataset"] == "webdataset is not installed"


def test_a_peer_that_dies_in_a_round_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stand_in(
        tmp_path, monkeypatch, STAND_IN.replace('reply = {"seconds"', 'sys.exit(4); {"s"')
    )
    with (
        records_peers.started(folder, ["lmdb"]) as ((peer,), _),
        pytest.raises(PeerLost, match="ended with 4"),
    ):
        peer.round(tmp_path, tmp_path / "i.npy", 8, cold=False, views=False)


def test_the_worker_knows_every_peer_and_imports_nothing_of_ours() -> None:
    text = records_peers.WORKER.read_text()
    assert "fireflyer" not in text.split('"""', 2)[2]
    for name in records_peers.REQUIRES:
        assert f'"{name}": ' in text


def test_the_data_is_the_same_everywhere(tmp_path: Path) -> None:
    data = DataSet(name="t", folder=tmp_path / "d", count=20, mean=100, deviation=30, loose=20)
    data.make()
    made = data.record.stat().st_mtime_ns
    data.make()
    assert data.record.stat().st_mtime_ns == made
    raw = (data.folder / "raw.bin").read_bytes()
    offsets = np.load(data.folder / "offsets.npy")
    with FileReader(data.record) as reader:
        for index in range(20):
            sample = reader.read_one(index).tobytes()
            assert sample == raw[offsets[index] : offsets[index + 1]]
            assert sample == data.loose_name(index).read_bytes()
    assert 33 <= data.sizes().min() <= data.sizes().max() <= 166


def test_orders_repeat_by_seed_and_visit_all() -> None:
    assert order(1, 10, 10).tolist() == order(1, 10, 10).tolist()
    assert order(1, 10, 10).tolist() != order(2, 10, 10).tolist()
    assert sorted(order(3, 10, 20).tolist()) == sorted([*range(10)] * 2)


def test_without_fio_the_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    data = DataSet(name="t", folder=tmp_path / "d", count=8, mean=64, deviation=1, loose=0)
    with pytest.raises(ConfigError, match="apt-get install fio"):
        records_cases.fio(data)


def test_packing_and_cat_write_the_same_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.bin").write_bytes(bytes([number]) * 100)
    assert records_cases.packing(folder, tmp_path / "a.ffr") > 0
    assert records_cases.concatenating(folder, tmp_path / "a.cat") > 0
    with FileReader(tmp_path / "a.ffr") as reader:
        packed = sorted(s.tobytes() for s in reader.read(range(5)))
    whole = (tmp_path / "a.cat").read_bytes()
    assert packed == sorted(whole[at : at + 100] for at in range(0, 500, 100))


@pytest.mark.parametrize(
    "arguments",
    [["--only", "hot"], ["--scale", "0"], ["--rounds", "0"], ["--install-peers"]],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run_app(app, "fireflyer bench", ["records", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_groups_and_options_name_the_same() -> None:
    from fireflyer.bench.harness import options

    assert tuple(records.GROUPS) == options.RECORDS


FAKE_LMDB = """
import pathlib, pickle
class Env:
    def __init__(self, path):
        self.path, self.held = pathlib.Path(path), {}
    def begin(self, write=False, buffers=False):
        if not write:
            self.held = pickle.loads(self.path.read_bytes())
        return self
    def put(self, key, value, append): self.held[key] = value
    def get(self, key): return self.held[key]
    def sync(self): self.path.write_bytes(pickle.dumps(self.held))
    def abort(self): pass
    def close(self): pass
    def __enter__(self): return self
    def __exit__(self, *_): pass
def open(path, **_):
    return Env(path)
"""


def test_the_worker_writes_and_reads_a_peers_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "fake"
    (fake / "lmdb-9.9.dist-info").mkdir(parents=True)
    (fake / "lmdb-9.9.dist-info" / "METADATA").write_text("Name: lmdb\nVersion: 9.9\n")
    (fake / "lmdb.py").write_text(FAKE_LMDB)
    monkeypatch.setenv("PYTHONPATH", str(fake))
    python = records_peers.python_of(tmp_path / "peers", "lmdb")
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    data = DataSet(name="t", folder=tmp_path / "d", count=20, mean=9000, deviation=30, loose=0)
    data.make()
    np.save(tmp_path / "i.npy", order(0, 20, 20))
    work = tmp_path / "work"
    with records_peers.started(tmp_path / "peers", ["lmdb"]) as ((peer,), missing):
        assert missing == {}
        assert (peer.version, peer.views, peer.verifies, peer.sequential) == (
            "9.9",
            True,
            False,
            False,
        )
        peer.prepare(data.folder, work)
        made = (work / "data.lmdb").stat().st_mtime_ns
        peer.prepare(data.folder, work)
        assert (work / "data.lmdb").stat().st_mtime_ns == made
        for cold, views in ((False, False), (True, False), (False, True)):
            assert peer.round(work, tmp_path / "i.npy", 8, cold=cold, views=views) > 0
        reply = peer.ask(
            {"do": "round", "work": str(work), "indices": str(tmp_path / "i.npy"), "batch": 7,
             "cold": False, "views": True}
        )  # fmt: skip
        assert reply["bytes"] == data.sizes().sum()
        with pytest.raises(PeerLost, match="cannot round: FileNotFoundError"):
            peer.round(tmp_path / "nothing", tmp_path / "i.npy", 8, cold=False, views=False)
        assert peer.round(work, tmp_path / "i.npy", 8, cold=False, views=False) > 0
