"""Failure statistics: the paper's tables, rates, lemons, traces and bad files."""

import csv
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.draws import cases, full

from fireflyer.cli.app import run_line
from fireflyer.validator.failures.generate import generate, preset, presets
from fireflyer.validator.failures.records import Failure, Source, from_events, parse
from fireflyer.validator.failures.report import paper, report
from fireflyer.validator.failures.statistics import lemons, rate


def reported(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    assert run_line(["failures", "report", *line, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# -- the paper -------------------------------------------------------------------------------------


def test_table_vi(capsys: pytest.CaptureFixture[str]) -> None:
    table = reported(capsys, "--paper")["table_vi"]
    assert {row["xid"]: (row["count"], row["percent"]) for row in table["rows"]} == {
        74: (5521, 42.57), 13: (45, 0.35), 31: (2487, 19.18), 43: (4342, 33.48), 45: (240, 1.85),
        63: (245, 1.89), 64: (2, 0.02), 94: (13, 0.10), 95: (17, 0.13), 44: (1, 0.01),
        48: (2, 0.02), 61: (13, 0.10), 62: (3, 0.02), 69: (1, 0.01), 79: (37, 0.29),
        119: (1, 0.01),
    }  # fmt: skip
    assert table["total"] == 12_970
    assert {name: entry["count"] for name, entry in table["classes"].items()} == {
        "software": 7114, "nvlink": 5521, "gpu_ecc": 277, "uncorrectable": 57, "gsp": 1,
    }  # fmt: skip


def test_table_vii() -> None:
    table = report(paper())["table_vii"]
    names = ["main_memory_ecc", "network", "xid63", "xid64", "xid79", "xid94", "xid95", "total"]
    assert [*table["columns"], "total"] == names
    assert [[row[name] for name in names] for row in table["rows"]] == [
        [4, 29, 21, 0, 0, 0, 0, 54],
        [14, 8, 22, 0, 0, 4, 0, 48],
        [8, 17, 21, 0, 4, 2, 2, 54],
        [11, 9, 16, 1, 3, 1, 1, 42],
        [8, 12, 18, 0, 2, 0, 3, 43],
        [9, 14, 22, 0, 6, 0, 0, 51],
    ]
    assert [table["sums"][name] for name in names] == [54, 89, 120, 1, 15, 7, 6, 292]


def test_table_viii() -> None:
    table = report(paper())["table_viii"]
    assert (len(table["rows"]), table["total"]) == (101, 213)
    assert list(table["months"].values()) == [8, 30, 13, 39, 30, 20, 13, 8, 17, 9, 12, 14]
    assert {(row["date"], row["events"]) for row in table["rows"]} >= {
        ("2023-06-16", 0), ("2023-05-28", 10), ("2023-07-07", 10), ("2024-03-31", 1),
    }  # fmt: skip


def test_contradictions_of_the_paper_are_named() -> None:
    found = {one["subject"]: one["text"] for one in report(paper())["contradictions"]}
    assert found["network failures of 2023-10"].startswith("29 in the table by month (VII), but 13")
    assert "2023-06-16 with 0" in found["2023-06-16"]
    assert "73 of 276, 26.4%" in found["share of network failures, 30 %"]
    assert "20 times" in found["Xid 74 several orders of magnitude above other faults"]
    assert "94.3%" in found["NVLink, 42.57 % here against 52.42 % elsewhere"]
    assert len(found) == 5


def test_contradictions_of_another_site() -> None:
    months = parse("month,network,xid79,total\n2024-01,3,9,12\n2024-02,4,0,5\n", "months")
    year = parse("xid,count\n79,8\n", "year")
    days = parse("date,events\n2023-12-30,1\n2024-01-03,3\n2024-02-03,5\n", "days")
    found = {one["subject"]: one["text"] for one in report([months, year, days])["contradictions"]}
    assert found == {
        "total of 2024-02": "months states 5; the row's counts add up to 4",
        "network failures of 2024-02": "4 in the table by month (VII), but 5 in the table by day (VIII)",
        "xid79": "9 in 2 months (VII), but 8 in the year (VI)",
    }


def test_the_report_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["failures", "report", "--paper"]) == 0
    shown = capsys.readouterr().out
    for text in ("42.57 %", "28:10", "Contradictions", "15.04 h"):
        assert text in shown


# -- rates -----------------------------------------------------------------------------------------


def test_a_rate_by_hand() -> None:
    """10 failures in 100 days: the exact interval of a Poisson mean of 10 is 4.7954 to 18.3904."""
    found = rate("a", 10, 100.0, 50, None)
    assert found.mtbf_h == 240.0
    assert found.low_h == pytest.approx(2400 / 18.39036, rel=1e-5)
    assert found.high_h == pytest.approx(2400 / 4.795389, rel=1e-5)
    assert found.per_1000_node_days == pytest.approx(2.0)


def test_no_failure_bounds_the_rate_from_one_side() -> None:
    """Rule of three, at 97.5 %: the mean is below 3.689."""
    found = rate("a", 0, 10.0, None, None)
    assert (found.mtbf_h, found.high_h) == (None, None)
    assert found.low_h == pytest.approx(240 / 3.688879, rel=1e-5)


@pytest.mark.parametrize("bursts", [False, True])
def test_intervals_cover_the_true_rate(bursts: bool) -> None:
    """At least 90 % of the intervals at 95 % contain the mean; with bursts they have to be wide."""
    draw = np.random.default_rng(1)
    covered, tried = 0, cases(400)
    for _ in range(tried):
        daily = draw.poisson(0.3, 300) if not bursts else 4 * draw.poisson(0.075, 300)
        found = rate("a", int(daily.sum()), 300.0, None, daily.tolist())
        covered += found.low_h <= 24 / 0.3 <= (found.high_h or math.inf)
    assert covered >= 0.9 * tried


def test_lemons_are_found_and_healthy_nodes_are_not() -> None:
    draw = np.random.default_rng(2)
    counts = {f"n{at}": int(count) for at, count in enumerate(draw.poisson(0.5, 500))}
    counts = {node: count for node, count in counts.items() if count}
    assert lemons(counts, 500) == []
    found = lemons(counts | {"n7": 9, "n8": 30}, 500)
    assert [one.node for one in found] == ["n8", "n7"]
    assert found[0].expected == pytest.approx(0.5, abs=0.1)
    assert lemons({"only": 1}, 1000) == []


# -- traces ----------------------------------------------------------------------------------------


def test_traces_have_the_rates_of_their_presets(tmp_path: Path, capsys: Any) -> None:
    path = str(tmp_path / "t.csv")
    assert run_line(["failures", "generate", "-o", path, "--seed", "5", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    found = reported(capsys, path, "--nodes", "1250", "--days", "365")
    rates = {one["of"]: one for one in found["rates"]}
    wanted = {"software": 7114, "nvlink": 5521, "gpu_ecc": 277, "network": 213 * 365 / 348}
    for of, count in wanted.items():
        spread = math.sqrt(max(rates[of]["dispersion"], 1.0) * count)
        assert abs(rates[of]["failures"] - count) <= 5 * spread
        assert made["classes"][of] == rates[of]["failures"]
    assert rates["network"]["dispersion"] > 2, "cuts come in bursts"
    assert found["lemons"] == []
    assert "arXiv 2408.14158" in made["source"]


def test_presets_state_their_sources() -> None:
    assert {"paper", "llama3", "rsc1", "rsc2"} <= presets().keys()
    per_node = {name: sum(c.events / c.days for c in one.classes) / one.nodes * 1000
                for name, one in presets().items()}  # fmt: skip
    assert per_node["rsc1"] == pytest.approx(6.5)
    assert per_node["rsc2"] == pytest.approx(2.34)
    assert sum(c.events for c in preset("llama3").classes) == 419
    tables = report(paper())
    xids = {c.xid: c.events for c in preset("paper").classes if c.xid}
    assert xids == {row["xid"]: row["count"] for row in tables["table_vi"]["rows"]}
    counts = Counter(row["events"] for row in tables["table_viii"]["rows"])
    bursts = next(c.bursts for c in preset("paper").classes if c.bursts)
    assert {(n, d) for n, d in bursts if n} == {(n, d) for n, d in counts.items() if n}
    assert sum(days for _, days in bursts) == 348


def test_a_seed_gives_one_trace() -> None:
    made = [generate(preset("paper"), 40, 30.0, seed, 0.0) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    assert [f.when for f in made[0]] == sorted(f.when for f in made[0])
    assert {f.node for f in made[0]} <= {f"n{at}" for at in range(1, 41)}


@pytest.mark.full
def test_a_fleet_twice_as_large_fails_twice_as_often() -> None:
    one, two = (len(generate(preset("paper"), nodes, 365.0, 3, 0.0)) for nodes in (1250, 2500))
    assert two / one == pytest.approx(2, rel=0.05)


# -- what is read ----------------------------------------------------------------------------------


def test_the_platforms_events() -> None:
    def event(wall: float, **detail: object) -> dict[str, object]:
        return {"kind": "observed", "wall": wall, "detail": {"wall": wall, **detail}}

    events = [
        event(1e9, what="xid", code=79, node="n1"),
        event(1e9 + 1, what="network", state="down", node="n1"),
        event(1e9 + 2, what="network", state="up", node="n1"),
        event(1e9 + 3, what="memory", corrected=True, node="n2"),
        event(1e9 + 4, what="memory", corrected=False, node="n2"),
        event(1e9 + 5, what="validator", passed=False, node="n2"),
        event(1e9 + 6, what="exit", node="n2"),
        event(1e9 + 7, what="hang", node=""),
        {"kind": "running", "wall": 1e9, "detail": {}},
    ]
    wanted = ["uncorrectable", "network", "main_memory_ecc", "validator", "hang"]
    assert [f.of for f in from_events(events, "here").failures] == wanted
    lines = "\n".join(json.dumps(one) for one in events)
    assert [f.of for f in parse(lines, "f").failures] == wanted
    assert [f.of for f in parse(json.dumps(events), "f").failures] == wanted


def test_times_in_both_forms() -> None:
    text = "time,node,class,xid\n2024-01-01T00:00:00+00:00,a,,79\n1704067200,b,disk,\n"
    assert parse(text, "f") == Source(
        name="f",
        failures=(
            Failure(when=1704067200.0, of="uncorrectable", xid=79, node="a"),
            Failure(when=1704067200.0, of="disk", node="b"),
        ),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("a,b\n1,2\n", "unknown header 'a,b'"),
        ("xid,count\n79,many\n", "line 2: invalid count 'many'"),
        ("xid,count\n79,-1\n", "line 2: invalid count '-1'"),
        ("xid,count\n79,1\n79,2\n", "line 3: Xid 79 is listed twice"),
        ("xid,count\n79\n", "line 2: 1 cells: expected 2"),
        ("month,network\n2024-13,1\n", "line 2: invalid date '2024-13': expected YYYY-MM"),
        ("date,events\n2024-02-30,1\n", "invalid date '2024-02-30'"),
        ("date,events\n2024-02-03,1\n2024-02-03,1\n", "is listed twice"),
        ("time,class\nnow,disk\n", "invalid time 'now'"),
        ("time,class\nnan,disk\n", "invalid time 'nan'"),
        ("time,class\n1,\n", "neither class nor xid"),
        ("[{]", "not valid JSON"),
        ('[{"kind": "observed"}]', "event 1: expected an event"),
        ("[1]", "event 1: expected an event"),
        ("date,events\n", "no failure"),
    ],
)
def test_bad_files(tmp_path: Path, capsys: Any, text: str, message: str) -> None:
    path = tmp_path / "f.csv"
    path.write_text(text)
    assert run_line(["failures", "report", str(path)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["report"], "needs one of"),
        (["report", "--paper", "f.csv"], "needs one of"),
        (["report", "missing.csv"], "cannot read missing.csv: No such file or directory"),
        (["generate", "--preset", "mars"], "invalid preset 'mars'"),
        (["generate", "--json"], "needs --output"),
        (["generate", "--nodes", "1000000", "--days", "36500", "-o", "x"], "fewer nodes or days"),
    ],
)
def test_bad_requests(capsys: Any, line: list[str], message: str) -> None:
    assert run_line(["failures", *line]) == 1
    assert message in capsys.readouterr().err


def test_an_observation_shorter_than_the_trace(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "f.csv"
    path.write_text("time,node,class\n0,a,disk\n864000,b,disk\n")
    for days in ("0", "inf", "nan"):
        assert run_line(["failures", "report", str(path), "--days", days]) == 2
        assert "--days" in capsys.readouterr().err
    assert run_line(["failures", "report", str(path), "--days", "3"]) == 1
    assert "lie 10.0 days apart" in capsys.readouterr().err
    assert run_line(["failures", "report", str(path), "--nodes", "1"]) == 1
    assert "failures of 2 nodes" in capsys.readouterr().err


def test_a_trace_on_stdout(capsys: Any) -> None:
    days = "30" if full() else "3"
    assert run_line(["failures", "generate", "--preset", "rsc1", "--days", days]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert rows[0].keys() == {"time", "node", "class", "xid"}
    assert len(rows) > 10
