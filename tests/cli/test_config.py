"""Settings of the platform and the files that hold them."""

import json
from pathlib import Path
from typing import Any

import pytest

from fireflyer.cli.app import run_line
from fireflyer.hai.home import EngineFile, Home, Settings
from fireflyer.hai.server.settings import remember


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.delenv("FIREFLYER_FS", raising=False)
    return Home(tmp_path)


def shown(home: Home, verb: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert run_line(["config", verb, "--json", "--home", str(home.path)]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_show_has_what_a_server_of_the_home_would_use(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(home, Settings(gpus="8:a100"))
    home.write_engine(EngineFile(engine="slurm", partition="gpu"))
    monkeypatch.setenv("FIREFLYER_ZONE", "left")
    monkeypatch.setenv("FIREFLYER_FS_SECRET", "a" * 64)
    rows = {(row["section"], row["key"]): row for row in shown(home, "show", capsys)}
    assert "a" * 64 not in str(rows)
    platform = {key: row for (section, key), row in rows.items() if section == "platform"}
    assert (platform["gpus"]["value"], platform["gpus"]["source"]) == ("8:a100", str(home.settings))
    assert (platform["nodes"]["value"], platform["nodes"]["source"]) == (2, "default")
    assert (platform["partition"]["value"], platform["partition"]["source"]) == (
        "gpu",
        str(home.engine),
    )
    assert rows["environment", "FIREFLYER_ZONE"]["value"] == "left"


def test_path_names_files_and_which_exist(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    remember(home, Settings(nodes=3))
    exists = {row["path"]: row["exists"] for row in shown(home, "path", capsys)}
    assert exists[str(home.settings)] is True
    assert exists[str(home.path / "faults.toml")] is False
    assert run_line(["config", "path", "--home", str(home.path)]) == 0
    assert "validator.toml" in capsys.readouterr().out
