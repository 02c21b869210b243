"""`fireflyer bench` produces the one report format, with numbers from a real run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from fireflyer.bench.__main__ import app
from fireflyer.bench.collectives import one_host
from fireflyer.bench.harness.report import NcclRow, Row
from fireflyer.program import run_app

ROW_KEYS = {
    *("case", "unit", "ours", "peer", "peer_value", "ratio", "bound", "of_bound"),
    *("rounds", "spread", "goal"),
}
NCCL_KEYS = {"who", "size", "count", "type", "redop", "time_us", "algbw", "busbw", "wrong"}


def run(*arguments: str) -> int:
    return run_app(app, "fireflyer bench", list(arguments))


def check_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert set(row) == ROW_KEYS
        assert row["ours"] > 0
        better = row["ours"] / row["peer_value"], row["peer_value"] / row["ours"]
        more_is_better = row["unit"] in ("GB/s", "cores")
        assert row["ratio"] == pytest.approx(better[0 if more_is_better else 1])


def test_allreduce_report() -> None:
    command = [sys.executable, "-m", "fireflyer.bench", "allreduce", "--sizes", "4K,1M"]
    done = subprocess.run(
        [*command, "--rounds", "2", "--json"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["bench"] == "allreduce"
    assert set(report) == {"bench", "command", "machine", "rows", "nccl"}
    assert set(report["machine"]) == {"cpu", "cores", "isa", "memory", "kernel", "load"}
    # Two sizes: the cores had; two kinds of memory: wall and CPU against gloo, bytes against 3 limits.
    assert len(report["rows"]) == 2 * (1 + 2 * 5)
    check_rows(report["rows"])
    for row in report["rows"]:
        assert row["rounds"] == 2
        assert (row["bound"] is None) == row["case"].endswith("CPU")
    for row in report["nccl"]:
        assert set(row) == NCCL_KEYS
        assert (row["type"], row["redop"], row["wrong"]) == ("float32", "sum", 0)


def test_the_terminal_shows_both_tables_and_marks_what_is_below_its_goal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        Row.of_times("slow case", "us", [10], "gloo", [20], [5], goal=4),
        Row.of_times("fast case", "us", [10], "gloo", [80], [5], goal=4),
        Row.of_times("odd case", "us", [10], "Open MPI has no bfloat16", []),
    ]
    nccl = [nccl_row(wrong=0)]
    monkeypatch.setattr(one_host, "run", lambda _: (rows, nccl))
    assert run("allreduce") == 0
    shown = capsys.readouterr().out
    lines = {row.case: next(s for s in shown.splitlines() if row.case in s) for row in rows}
    assert "2x below" in lines["slow case"]
    assert "8x" in lines["fast case"]
    assert "below" not in lines["fast case"]
    assert "has no bfloat16" in lines["odd case"]
    assert "1 of 2 goals reached" in shown
    for column in ("size (B)", "count", "type", "redop", "time (us)", "algbw", "busbw", "#wrong"):
        assert column in shown


def nccl_row(wrong: int) -> NcclRow:
    return NcclRow(
        who="zero-copy", size=4, count=1, type="float32", redop="sum",
        time_us=1.0, algbw=1.0, busbw=1.0, wrong=wrong,
    )  # fmt: skip


def test_wrong_values_are_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_host, "run", lambda _: ([], [nccl_row(wrong=3)]))
    assert run("allreduce", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["nccl"][0]["wrong"] == 3
    assert err == "fireflyer: bench allreduce: 3 elements are wrong; see column #wrong\n"


def test_a_ratio_above_one_means_ours_is_better() -> None:
    row = Row.of_times("c", "us", [1, 2, 9], "gloo", [8, 4, 6], [1.0, 1.0, 1.0], goal=4)
    assert (row.ours, row.peer_value, row.ratio, row.of_bound, row.spread) == (2, 6, 3, 0.5, 9)
    row = Row.of_rates("c", "GB/s", [10, 30, 20], "add limit", [40, 40, 40])
    assert (row.ours, row.peer_value, row.ratio, row.of_bound, row.spread) == (20, 40, 0.5, 0.5, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        ["allreduce", "--sizes", "1X"],
        ["allreduce", "--dtype", "int3"],
        ["allreduce", "--dtype", "float32,"],
        ["allreduce", "--ranks", "0"],
        ["allreduce", "--op", "sum,max"],
        ["allreduce", "--against", "nccl"],
        ["broadcast", "--memory", "shared"],
        ["broadcast", "--op", "max"],
        ["sendrecv", "--ranks", "1"],
        ["barrier", "--sizes", "1M"],
        ["network", "--hosts", "1"],
        ["network", "--orders", "random"],
        ["network", "--wire", "int3"],
        ["allsum"],
    ],
)
def test_bad_options_are_usage_errors(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"fireflyer: [^\n]+\n", err), err


@pytest.mark.parametrize("forced", ["base", "v3", "v9"])
def test_reports_name_the_instruction_set_that_is_forced(forced: str) -> None:
    code = "from fireflyer.bench.harness.report import Machine; print(Machine.here().isa)"
    environment = os.environ | {"FIREFLYER_ISA": forced}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    if forced == "v9" or (forced == "v3" and "avx2" not in flags):
        assert f"invalid FIREFLYER_ISA '{forced}': expected " in done.stderr
    else:
        width = 256 if forced == "v3" and "vpclmulqdq" in flags else 128
        assert done.stdout == f"{forced}, {width}-bit CRCs\n"


@pytest.mark.parametrize("arguments", [[], ["-h"]])
def test_help_names_the_command_as_people_call_it(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "fireflyer.bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.lstrip().startswith("Usage: fireflyer bench [OPTIONS] COMMAND")
    for name in ("allreduce", "alltoall", "barrier", "overhead", "network"):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter", "sendrecv", "network"])
def test_help_shows_an_example(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run(name, "--help") == 0
    assert f"\n  fireflyer bench {name} --" in capsys.readouterr().out


def test_every_benchmark_prints_json_and_writes_it() -> None:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        found = {option: each for each in command.params for option in each.opts}
        assert found["--json"].help == "Print JSON alone on stdout.", name
        assert found["--json"].is_flag
        assert not found["--output"].is_flag
