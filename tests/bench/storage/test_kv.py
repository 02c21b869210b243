"""`fireflyer bench kv` with little work: every row is there, with its peer or the reason for its lack."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def rows_of(folder: Path, only: str, *options: str) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "fireflyer.cli",
        "bench",
        "kv",
        "--json",
        "--rounds",
        "1",
    ]
    command += ["--scale", "0.01", "--work", str(folder), "--peers", str(folder / "none")]
    done = subprocess.run(
        [*command, "--only", only, *options], capture_output=True, text=True, check=True
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def test_look_ups_memory_and_files_are_measured(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "file,exists,memory")
    assert [row["case"] for row in rows] == [
        "32 pages of 4.3 MB, folder, warm", "32 pages of 4.3 MB, folder, cold",
        "exists of 128 keys, of 500 pages, p50", "exists of 128 keys, of 500 pages, p99",
        "index of 10,000 pages", "index of 10,000 pages, growth",
    ]  # fmt: skip
    assert all(row["ours"] > 0 for row in rows[:5])
    assert 40 < rows[4]["ours"] <= 128


@pytest.mark.full
def test_stores_are_measured_without_their_peer(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "ycsb,pages,seen,open", "--store", "8MiB")
    assert {row["peer"] for row in rows if "YCSB" in row["case"]} == {"rocksdict is not installed"}
    assert len(rows) == 6 + 1 + 4 + 2
    assert all(row["ours"] > 0 for row in rows)
