"""Benchmarks produce the one report format, with numbers from a real run."""

import json
import re
import subprocess
import sys

import pytest

from fireflyer.bench.__main__ import with_default_json
from fireflyer.bench.report import Row

BENCH = [sys.executable, "-m", "fireflyer.bench", "allreduce"]


def test_allreduce_report() -> None:
    done = subprocess.run(
        [*BENCH, "--ranks", "2", "--sizes", "4K,1M", "--rounds", "2", "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bench"] == "allreduce"
    assert set(report["machine"]) == {"cpu", "cores", "memory", "kernel", "load"}
    assert len(report["rows"]) == 8  # two sizes, two kinds of memory, wall and CPU
    for row in report["rows"]:
        assert row["ours"] > 0
        assert row["rounds"] == 2
        assert row["ratio"] == pytest.approx(row["peer_value"] / row["ours"])
        assert (row["bound"] is not None) == row["case"].endswith("wall")


def test_a_ratio_above_one_means_ours_is_better() -> None:
    row = Row.of_times("c", "us", [1, 2, 9], "gloo", [8, 4, 6], [1.0, 1.0, 1.0], goal=4)
    assert (row.ours, row.peer_value, row.ratio, row.of_bound, row.spread) == (2, 6, 3, 0.5, 9)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["a", "--json"], ["a", "--json", "-"]),
        (["a", "--json", "--ranks", "2"], ["a", "--json", "-", "--ranks", "2"]),
        (["a", "--json", "f"], ["a", "--json", "f"]),
    ],
)
def test_json_without_a_file(given: list[str], meant: list[str]) -> None:
    assert with_default_json(given) == meant


@pytest.mark.parametrize("arguments", [["--sizes", "1X"], ["--dtype", "int3"], ["--ranks", "0"]])
def test_bad_options_are_usage_errors(arguments: list[str]) -> None:
    done = subprocess.run(
        [*BENCH, *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert re.fullmatch(r"fireflyer: [^\n]+\n", done.stderr), done.stderr


@pytest.mark.parametrize("arguments", [[], ["-h"]])
def test_help_names_the_command_as_people_call_it(arguments: list[str]) -> None:
    done = subprocess.run([*BENCH[:-1], *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.lstrip().startswith("Usage: fireflyer bench [OPTIONS] COMMAND")
    assert "allreduce" in done.stdout
