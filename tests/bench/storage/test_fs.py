"""`fireflyer bench fs` at tiny sizes: real services, real numbers, missing peers shown as missing."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT_S

from fireflyer.bench.__main__ import app
from fireflyer.bench.fs import benchmark as fs
from fireflyer.bench.fs import growth, names, raw
from fireflyer.bench.fs.cluster import FileSystem, Service, Worker, together
from fireflyer.bench.harness import curves, goals, options
from fireflyer.bench.peers import mounting
from fireflyer.errors import ConfigError, PeerLost
from fireflyer.fs3.client import Settings
from fireflyer.lab import namespaces
from fireflyer.program import run_app

MISSING = namespaces.why_not()
ALONE = "tcp,local,small,write,one,memory"
ROW_KEYS = {
    *("case", "unit", "ours", "peer", "peer_value", "ratio", "bound", "of_bound"),
    *("rounds", "spread", "goal"),
}


def run(tmp_path: Path, *more: str) -> tuple[int, Path]:
    report = tmp_path / "report.json"
    arguments = ["fs", "--work", str(tmp_path / "work"), "--quick", "--rounds", "2"]
    return run_app(app, "fireflyer bench", [*arguments, "--output", str(report), *more]), report


def rows_of(report: Path) -> list[dict[str, Any]]:
    found = json.loads(report.read_text())
    assert found["bench"] == "fs"
    assert set(found["machine"]) == {"cpu", "cores", "isa", "memory", "kernel", "load"}
    return list(found["rows"])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The cases that need neither a peer nor root."""
    folder = tmp_path_factory.mktemp("fs")
    code, report = run(folder, "--only", ALONE)
    assert code == 0
    assert os.listdir(folder / "work") == [], "what it wrote is removed"
    return rows_of(report)


@pytest.mark.full
def test_every_case_has_its_rows_and_the_goals_that_are_asked_for(
    rows: list[dict[str, Any]],
) -> None:
    asked = {(row["case"], row["goal"], row.get("aim")) for row in rows}
    assert asked == {
        ("4 MiB reads over TCP", 0.8, 0.95),
        ("4 MiB reads on the same node", 0.65, 0.8),
        ("4 KiB random reads, 64 a batch", 0.6, 0.8),
        ("4 MiB writes, 2 replicas", 0.7, 0.85),
        ("creates, one caller", 0.8, 0.9),
        ("index of a chunk", 1.0, None),
        ("manager and meta, 2,000 files", 1.0, None),
        ("client beyond its callers' memory, 8 readers", 1.0, None),
    }


@pytest.mark.full
def test_ratios_above_one_mean_that_ours_is_better(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert set(row) - {"aim"} == ROW_KEYS
        assert row["ours"] > 0
        better = row["ours"] / row["peer_value"], row["peer_value"] / row["ours"]
        more_is_better = row["unit"] not in ("B", "MiB")
        assert row["ratio"] == pytest.approx(better[0 if more_is_better else 1])
        assert row["rounds"] == (2 if more_is_better else 1)


@pytest.mark.full
def test_memory_stays_within_what_is_asked(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["unit"] in ("B", "MiB"):
            assert row["ratio"] >= 1, row


@pytest.mark.full
def test_peers_that_cannot_be_had_are_shown_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no() -> None:
        raise ConfigError("mounting a peer needs root")

    for name in ("juicefs", "moosefs"):
        monkeypatch.setattr(f"fireflyer.bench.peers.{name}.check_can_mount", no)
    code, report = run(tmp_path, "--only", "create,stat")
    assert code == 0
    found = rows_of(report)
    assert [(row["case"], row["peer"].split(":")[0]) for row in found] == [
        ("creates, 64 callers", "juicefs"),
        ("creates, 64 callers", "moosefs"),
        ("files opened new and closed, 64 callers", "juicefs"),
        ("stat, 256 a call", "juicefs"),
    ]
    for row in found:
        assert row["peer"].endswith("mounting a peer needs root")
        assert row["ours"] > 0
        assert (row["peer_value"], row["ratio"], row["goal"]) == (None, None, None)
        assert "aim" not in row


@pytest.mark.parametrize(
    ("program", "message"),
    [("apt-get", "this machine has no apt-get"), ("dpkg", "this machine has no dpkg")],
)
def test_without_debians_tools_its_packages_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in {"apt-get", "dpkg"} - {program}:
        (tools / name).write_text("#!/bin/sh\nexit 0\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(ConfigError, match=message):
        mounting.debian(tmp_path / "peer", ["moosefs-master"])


def test_a_package_that_cannot_be_fetched_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "apt-get").write_text("#!/bin/sh\necho 'E: no such package' >&2\nexit 100\n")
    (tools / "dpkg").write_text("#!/bin/sh\nexit 0\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match="no such package"):
        mounting.debian(tmp_path / "peer", ["moosefs-master"])
    assert os.listdir(tmp_path / "peer") == []


def test_a_mounted_peer_whose_program_ends_says_why(tmp_path: Path) -> None:
    class Broken(mounting.Mounted):
        title = "Broken 1"

        def start(self) -> None:
            self.run(["sh", "-c", "echo no luck; exit 3"], {}, mounts=True)

    with (
        pytest.raises(PeerLost, match="Broken 1: sh ended with 3: no luck"),
        Broken(tmp_path / "b"),
    ):
        pytest.fail("it is not mounted")
    assert not (tmp_path / "b").exists()


def test_without_a_compiler_the_raw_reads_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"apt-get install g\+\+"):
        raw.RawReads("ring", tmp_path / "file", 4096, 64)


@pytest.mark.parametrize("way", ["ring", "sendfile"])
def test_raw_reads_read_and_tell_what_is_wrong(tmp_path: Path, way: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20))
    with raw.RawReads(way, file, 4096, 8) as read:
        assert read(1000, 3) > 0
        assert read(1, 0) > 0
    with (
        raw.RawReads(way, tmp_path / "nothing", 4096, 8) as read,
        pytest.raises(PeerLost, match="raw files ended"),
    ):
        read(1, 0)


def test_bare_sqlite_commits_the_rows_of_creates(tmp_path: Path) -> None:
    rows = raw.rows_of_creates(3, "a")
    assert len({tuple(key for key, _ in each) for each in rows}) == 3
    assert any(key.endswith(b"a-2") for key, _ in rows[1])
    with raw.BareSqlite(tmp_path / "bare.sqlite") as sqlite:
        assert sqlite(rows) > 0
    assert os.listdir(tmp_path) == []


def test_a_service_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("wrong = 1\n")
    service = Service(tmp_path / "log", ["--config", tmp_path / "cluster.toml"])
    with pytest.raises(PeerLost, match=r"ended with 1.*wrong"):
        service.wait_until_ready()
    service.close()


def test_a_worker_makes_looks_and_reads(tmp_path: Path) -> None:
    with FileSystem(tmp_path / "fs") as files, files.worker("client") as worker:
        many = {"directory": "", "prefix": "a", "count": 5, "threads": 2}
        assert together([worker], [{"do": "create", **many}]) > 0
        assert together([worker], [{"do": "open", **many, "prefix": "b"}]) > 0
        assert together([worker], [{"do": "stat", **many, "batch": 2}]) > 0
        worker.ask({"do": "put", "path": "/data", "bytes": (5 << 20) + 1})
        read = {"path": "/data", "block": 4096, "depth": 4, "count": 10, "seed": 3}
        for what in ("read", "small"):
            assert together([worker], [{"do": what, **read}]) > 0
        with files.attach() as client:
            assert sorted(client.listdir()) == [f"{p}-{n}" for p in "ab" for n in range(5)] + [
                "data"
            ]
            assert client.stat("/data").st_size == (5 << 20) + 1
        with pytest.raises(PeerLost, match=r"client cannot create: .*exists"):
            worker.ask({"do": "create", **many})
        assert worker.ask({"do": "stat", **many, "batch": 9})["ended"] > 0, "it goes on"


def test_a_worker_uses_a_mounted_file_system_likewise(tmp_path: Path) -> None:
    with Worker("peer", {"do": "mounted", "root": str(tmp_path)}) as worker:
        shares = {"do": "create", "directory": "", "prefix": "x", "count": 7, "threads": 1}
        for first in range(2):
            worker.ask({**shares, "first": first, "step": 2})
        assert sorted(os.listdir(tmp_path)) == [f"x-{number}" for number in range(7)]
        looked = {"do": "stat", "directory": "", "prefix": "x", "batch": 4}
        assert worker.ask({**looked, "count": 7})["ended"] > 0
        with pytest.raises(PeerLost, match="peer cannot stat"):
            worker.ask({**looked, "count": 8})
    with pytest.raises(PeerLost, match="cannot mounted"):
        Worker("peer", {"do": "mounted", "root": str(tmp_path / "nothing")})


@pytest.mark.full
@pytest.mark.netns
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_incast_measures_each_number_of_senders(tmp_path: Path) -> None:
    code, report = run(tmp_path, "--only", "incast")
    assert code == 0
    found = rows_of(report)
    default = Settings().senders
    numbers = sorted({1, 2, 4, 8, default})
    sending = [f", {n} send" + (" (default)" if n == default else "") for n in numbers]
    assert [row["case"].removeprefix("3 servers, one client, 1gbit") for row in found] == [
        *(each + part for each in sending for part in ("", ": sent")),
        ": at its port",
    ]
    for row in found:
        if row["unit"] != "MB/s":
            assert row["ours"] >= 1000


@pytest.mark.full
def test_growth_draws_every_curve(tmp_path: Path) -> None:
    code, report = run(tmp_path, "--growth", "--plots", str(tmp_path / "plots"))
    assert code == 0
    found = rows_of(report)
    assert {row["case"].rpartition(" ")[2] for row in found} == {
        "clients",
        "directory",
        "file",
        "files",
    }
    assert {row["peer"] for row in found} == {"at 1", "at 10", "at 1 B", "at 100"}
    drawn = {path.name: ElementTree.parse(path) for path in (tmp_path / "plots").iterdir()}
    assert set(drawn) == {f"fs3-growth-{name}.svg" for name in options.FS_GROWTH}
    dots = sum(element.tag.endswith("circle") for tree in drawn.values() for element in tree.iter())
    assert dots == len(found)


def test_a_plot_shows_every_point_within_its_panel() -> None:
    points = [(1.0, 3.0), (1000.0, 40.0), (1_000_000.0, 17.0)]
    line = growth.Curve("a < b", "files", "GB/s")
    line.points = points
    text = curves.draw("files & more", [line.panel("files")] * 2)
    root = ElementTree.fromstring(text)
    places = [(float(e.get("cx", 0)), float(e.get("cy", 0))) for e in root.iter() if e.get("cx")]
    assert len(places) == 6
    for index, (x, y) in enumerate(places):
        assert index // 3 * curves.WIDTH < x < (index // 3 + 1) * curves.WIDTH
        assert 0 < y < curves.HEIGHT
    assert places[1][1] < places[2][1] < places[0][1]
    one = growth.Curve("a", "files", "b")
    one.add(1e5, 10.0)
    assert "100k" in curves.draw("files", [one.panel("files")])


def test_cases_and_options_name_the_same() -> None:
    assert tuple(fs.CASES) == options.FS
    assert tuple(growth.CURVES) == options.FS_GROWTH
    assert goals.fs("create", "juicefs") == (8, 15)
    assert goals.fs("create", "moosefs") == (0.9, 1.5)
    assert goals.fs("stat", "juicefs") == (5, 15)
    assert names.CLIENTS * 16 == names.CALLERS


@pytest.mark.parametrize(
    "arguments", [["--only", "hot"], ["--curves", "x"], ["--rounds", "0"], ["--plots", "docs"]]
)
def test_bad_options(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run_app(app, "fireflyer bench", ["fs", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_sigterm_ends_the_services_and_removes_what_was_written(tmp_path: Path) -> None:
    work = tmp_path / "work"
    command = [sys.executable, "-m", "fireflyer.bench", "fs", "--only", "tcp,local", "--quick"]
    process = subprocess.Popen(
        [*command, "--work", work], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    assert b"4 MiB reads over TCP" in process.stderr.readline(), "it says what it does"
    assert mentioning(work) - {process.pid}, "services run"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert mentioning(work) == set()
    assert os.listdir(work) == []


def mentioning(path: Path) -> set[int]:
    """Processes whose command line names a path."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if os.fsencode(path) in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
    return found


def test_the_command_needs_no_torch() -> None:
    code = "import sys, fireflyer.bench.fs.benchmark; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
