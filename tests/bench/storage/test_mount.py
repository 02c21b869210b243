"""`fireflyer bench mount` at tiny sizes: real mounts, missing peers shown as missing."""

import json
import os
from pathlib import Path

import pytest
from tests.bench.storage.test_fs import ROW_KEYS
from tests.fs3.mount.conftest import why_not

from fireflyer.bench.__main__ import app
from fireflyer.bench.harness import options
from fireflyer.bench.mount import cases
from fireflyer.errors import ConfigError
from fireflyer.program import run_app


@pytest.mark.full
def test_every_case_has_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := why_not(tmp_path):
        pytest.skip(reason)

    def no(folder: Path) -> Path:
        raise ConfigError("no network")

    monkeypatch.setattr("fireflyer.bench.peers.juicefs.install", no)
    work, report = tmp_path / "work", tmp_path / "report.json"
    arguments = ["mount", "--work", str(work), "--quick", "--rounds", "2", "--output", str(report)]
    assert run_app(app, "fireflyer bench", arguments) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [(row["case"], row["peer"]) for row in rows] == [
        (
            "1 MiB reads in order, cold",
            "passthrough_hp: name the program with --passthrough FILE; it is one of libfuse's examples",
        ),
        ("1 MiB reads in order, cold", "our client, 4 a call"),
        ("1 MiB reads in order, cold", "juicefs: no network"),
        ("create, write 4 KiB, close: one caller", "juicefs: no network"),
        ("create, write 4 KiB, close: 16 callers", "juicefs: no network"),
        ("find over 250 files, names", "juicefs: no network"),
        ("find over 250 files, sizes", "juicefs: no network"),
    ]
    for row in rows:
        assert set(row) - {"aim"} == ROW_KEYS
        assert row["ours"] > 0
        assert (row["ratio"] is None) == (row["peer"] != "our client, 4 a call")
    assert os.listdir(work) == [], "what it mounted and wrote is gone"


def test_cases_and_options_name_the_same() -> None:
    assert tuple(cases.CASES) == options.MOUNT


@pytest.mark.parametrize("arguments", [["--only", "hot"], ["--rounds", "0"]])
def test_bad_options(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run_app(app, "fireflyer bench", ["mount", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
