"""`fireflyer sim`: files in, figures out; the same bytes for the same seed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fireflyer.cli.app import run_line

TRACE = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:00:00,7200,8,57600,aaaaaa
2017-10-09 07:30:00,60,1,60,bbbbbb
2017-10-09 07:40:00,60,64,3840,bbbbbb
"""
MEASURED = ("wall_s", "plan_mean_ms", "plan_max_ms")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(TRACE)
    return path


def figures(text: str) -> dict[str, Any]:
    """Without what depends on the machine."""
    found: dict[str, Any] = json.loads(text)
    for result in [found, *found.get("compared", [])]:
        for name in MEASURED:
            del result[name]
    return found


def test_a_policy_as_a_table_and_json(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    out.symlink_to("behind.json")  # stays
    line = ["sim", "--trace", str(trace), "--nodes", "1", "--policy", "fifo", "--json", str(out)]
    assert run_line(line) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "jobs.csv: 2 jobs of 2 users on 1 nodes of 8 GPUs"
    assert shown[1] == "left out: 1 jobs larger than the cluster"
    assert any(row.split()[:3] == ["JCT,", "mean", "1.76"] for row in shown), shown
    assert out.is_symlink()
    found = json.loads(out.read_text())
    wanted = {
        "policy", "jct_mean_h", "jct_p50_h", "jct_p99_h", "wait_mean_h", "preemptions", "occupancy",
        "goodput", "wall_s",
    }  # fmt: skip
    assert wanted <= found.keys()
    assert (found["policy"], found["jobs"], found["preemptions"]) == ("fifo", 2, 0)
    assert "compared" not in found


def test_policies_side_by_side(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "ab.html"
    line = ["sim", "--trace", str(trace), "--nodes", "1", "--compare", "fifo,timeshare"]
    assert run_line([*line, "--json", "-", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    [other] = found["compared"]
    assert (found["policy"], other["policy"]) == ("fifo", "timeshare")
    assert other["jct_mean_h"] < found["jct_mean_h"]
    assert other["preemptions"] == 1
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_same_seed_is_the_same_bytes() -> None:
    line = [
        sys.executable, "-P", "-m", "fireflyer.cli", "sim", "--generate", "seren:300", "--nodes", "8",
        "--faults", "paper:100", "--compare", "timeshare,fifo-backfill,las", "--json", "-", "--zones", "2",
    ]  # fmt: skip
    texts = []
    for number, seed in ((1, 5), (2, 5), (3, 6)):
        env = {**os.environ, "PYTHONHASHSEED": str(number), "PYTHONWARNINGS": "error"}
        done = subprocess.run(
            [*line, "--seed", str(seed)], env=env, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        texts.append(json.dumps(figures(done.stdout)))
    assert texts[0] == texts[1] != texts[2]


def test_quotas_and_windows(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job of 8 GPUs is over its quota; the other waits for the end of the second window."""
    page = tmp_path / "page.html"
    line = [
        "sim",
        "--trace",
        str(trace),
        "--nodes",
        "3",
        "--user-from",
        "cluster",
        "--policy",
        "fifo",
    ]
    line += ["--quota", "user=aaaaaa,gpus=7", "--quota", "group=bbbbbb priority=normal nodes=1"]
    line += ["--window", "34% n2 from=5min until=31min", "--window", "n0-n2,from=30min,until=1h"]
    assert run_line([*line, "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert (
        "left out: 1 jobs larger than their quota\nleft out: 1 jobs larger than the cluster"
        in shown
    )
    assert "GPU-time: window" in shown
    for line_of_page in (
        "<p>Quota of user aaaaaa: at most 7 GPUs.</p>",
        "<p>Quota of group bbbbbb, priority normal: at most 1 nodes.</p>",
        "<p>Window: 3 of the nodes from 0.5 h until 1 h.</p>",
    ):
        assert line_of_page in page.read_text()
    assert run_line([*line, "--html", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    assert run_line([*line, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["jobs"], found["over_quota"], found["too_large"]) == (1, 1, 1)
    assert found["wait_max_h"] == 0.5
    first, second = found["windows"]
    assert (first["nodes"], first["begin"], first["end"]) == (["n0", "n1", "n2"], 300, 1860)
    assert (second["nodes"], second["begin"], second["end"]) == (["n0", "n1", "n2"], 1800, 3600)
    assert found["split_gpu_ms"]["window"] == 24 * (3600 - 300) * 1000
    assert sum(found["split_gpu_ms"].values()) == found["capacity_gpu_ms"]


def test_the_quantum_is_timeshares(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["sim", "--trace", str(trace), "--nodes", "1", "--json", "-"]
    assert run_line([*line, "--quantum", "3h", "--fixed-quantum"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["policy"], found["preemptions"]) == ("timeshare-fixed", 0)
    assert run_line([*line, "--quantum", "5min", "--fixed-quantum"]) == 0
    assert json.loads(capsys.readouterr().out)["preemptions"] == 1
    assert run_line([*line, "--quantum", "5min", "--policy", "fifo"]) == 1
    assert "--quantum requires the policy timeshare, not fifo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "give the jobs to replay"),
        (["--trace", "x", "--generate", "philly:5"], "either --trace FILE or --generate"),
        (["--trace", "missing.csv"], "missing.csv: No such file"),
        (["--generate", "philly"], "expected CLUSTER:JOBS"),
        (["--generate", "pai:5"], "invalid cluster 'pai': expected one of"),
        (
            ["--generate", "philly:5", "--policy", "lifo"],
            "unknown policy 'lifo': expected one of timeshare",
        ),
        (["--generate", "philly:5", "--faults", "many"], "invalid faults 'many'"),
        (["--generate", "philly:5", "--user-from", "moon"], "invalid --user-from 'moon'"),
        (["--generate", "philly:5", "--restart-cost", "soon"], "invalid --restart-cost 'soon'"),
        (["--generate", "philly:5", "--checkpoint-every", "0"], "expected a time above 0"),
        (
            ["--generate", "philly:5", "--nodes", "2", "--zones", "3"],
            "at most the number of nodes, 2",
        ),
        (
            ["--generate", "philly:5", "--quota", "user=ada"],
            "limits nothing; give gpus=N or nodes=N",
        ),
        (["--generate", "philly:5", "--quota", "ada gpus=4"], "expected WORD=VALUE, not 'ada'"),
        (
            ["--generate", "philly:5", "--quota", "gpu=4"],
            "each of user, group, priority, gpus, nodes",
        ),
        (
            ["--generate", "philly:5", "--quota", "gpus=4 gpus=5"],
            "expected WORD=VALUE, at most once each of",
        ),
        (
            ["--generate", "philly:5", "--quota", "gpus=-4"],
            "expected a number of GPUs or nodes, not '-4'",
        ),
        (
            ["--generate", "philly:5", "--quota", "gpus=4 priority=top"],
            "expected one of these priorities: ",
        ),
        (["--generate", "philly:5", "--quota", "gpus=4 user=ada"], "has the user 'ada'"),
        (["--generate", "philly:5", "--window", "from=3h until=4h"], "names no node"),
        (["--generate", "philly:5", "--window", "n80"], "among n0 to n79"),
        (["--generate", "philly:5", "--window", "n7-n3"], "among n0 to n79"),
        (["--generate", "philly:5", "--window", "0%"], "among n0 to n79"),
        (["--generate", "philly:5", "--window", "n1 from=2d"], "expected an end after the start"),
        (["--generate", "philly:5", "--window", "n1 from=soon"], "invalid --window from 'soon'"),
        (["--generate", "philly:5", "--window", "n1 group=moon"], "has the group 'moon'"),
    ],
)
def test_what_cannot_work_is_one_line(
    options: list[str], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run_line(["sim", *options]) == 1
    err = capsys.readouterr().err
    assert why in err
    assert err.count("\n") == 1
