"""The trace follows the Chrome JSON rules and its sums are ours; the report's views agree."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.haiprof.profiles import HEALTHY, rank, stacks, values

from fireflyer.cli.app import run_line
from fireflyer.cli.prof.original_form import original_form
from fireflyer.errors import ConfigError, ProfileError
from fireflyer.haiprof.attach.collect import read_profile
from fireflyer.haiprof.attach.unprepared import parse
from fireflyer.haiprof.events import PHASES
from fireflyer.haiprof.recorders import chosen
from fireflyer.haiprof.records import Collective, Operator, RankProfile, Span, summary
from fireflyer.haiprof.report.document import document
from fireflyer.haiprof.report.html import page
from fireflyer.haiprof.report.prometheus import exposition
from fireflyer.haiprof.report.text import bar, lines
from fireflyer.haiprof.trace_file import trace


@pytest.fixture
def profiles() -> list[RankProfile]:
    found = [rank(n, steps=10) for n in range(2)]
    for one in found:
        values(one, "basic", {"rss_bytes": 1e6, "cpu_s_total": 0.0},
               {"rss_bytes": 2e6, "cpu_s_total": 0.5})  # fmt: skip
        stacks(one, {("forward<x>", "model.py", False): 60, ("log", "train.py", False): 40})
        for row in one.steps:
            at = row.begin_ns
            for name in ("data", "forward", "backward", "optimizer"):
                end = at + round(row.phases[name] * 1e9)
                one.add(Span(phase=name, name=name, begin_ns=at, end_ns=end))
                at = end
        one.add(Operator(name="aten::mm", begin_ns=10, end_ns=5_000_010, thread=7))
        one.add(Collective(name="all_reduce", at_ns=100, nbytes=4096, peers=[0, 1]))
    return found


def test_the_trace_keeps_the_rules_and_its_sums_are_ours(profiles: list[RankProfile]) -> None:
    events: list[dict[str, Any]] = json.loads(trace(profiles))["traceEvents"]
    spent: dict[tuple[int, str], float] = defaultdict(float)
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "MXCi"
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            spent[event["pid"], event["name"]] += event["dur"] / 1e6
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():  # on one track, slices nest or follow each other
        open_: list[float] = []
        for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_ and open_[-1] <= begin + 1e-3:
                open_.pop()
            assert not open_ or end <= open_[-1] + 1e-3
            open_.append(end)
    for one in profiles:
        number = one.header.rank
        for name in ("data", "forward", "backward", "optimizer"):
            ours = sum(row.phases[name] for row in one.steps)
            assert spent[number, name] == pytest.approx(ours, rel=1e-6)
        whole = sum(row.seconds for row in one.steps)
        stepped = sum(s for (pid, name), s in spent.items() if pid == number and "step" in name)
        assert stepped == pytest.approx(whole)
        assert spent[number, "forward<x>"] == pytest.approx(0.6, rel=0.1)
        assert spent[number, "aten::mm"] == pytest.approx(0.005)
    calls = [event for event in events if event["name"] == "all_reduce"]
    assert [call["args"] for call in calls] == [{"bytes": 4096, "peers": [0, 1]}] * 2
    assert json.loads(trace([])) == {"traceEvents": []}


def test_the_document_has_what_scripts_rely_on(profiles: list[RankProfile]) -> None:
    found = document(profiles)
    assert found["steps"] == 10
    assert found["covered"] == pytest.approx(0.98)
    assert found["phases"]["backward"] == pytest.approx(0.05, rel=0.02)
    assert set(found["phases"]) == set(PHASES)
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert found["ranks"][0]["recorders"]["basic"]["cpu_s_rate"] == pytest.approx(0.5, rel=0.1)
    assert found["ranks"][0]["operators"][0]["operator"] == "aten::mm"
    assert summary([])["covered"] is None


def test_the_page_is_self_contained_and_escapes(profiles: list[RankProfile]) -> None:
    text = page(document(profiles), profiles)
    assert "forward&lt;x&gt;" in text
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
    assert text.count("<svg") == 3, "the mean steps, and the steps of two ranks"


def test_prometheus_reads_the_exposition(profiles: list[RankProfile]) -> None:
    families = {f.name: f for f in text_string_to_metric_families(exposition(document(profiles)))}
    phases = {
        (s.labels["rank"], s.labels["phase"]): s.value
        for s in families["fireflyer_haiprof_phase_seconds"].samples
    }
    assert phases["1", "backward"] == pytest.approx(0.05, rel=0.02)


def test_text_names_findings_and_what_is_missing(profiles: list[RankProfile]) -> None:
    text = "\n".join(lines(document(profiles)))
    assert "No finding" in text
    assert "98.0% of their time accounted for" in text
    assert "communication" in text
    assert "checkpoint" not in text  # no rank has any
    slow = "\n".join(lines(document([rank(0, {**HEALTHY, "data": 0.3}, world=1)])))
    assert "1. Steps wait 300.0 ms for data" in slow
    assert bar({"forward": 1.0, "other": 1.0}, 10) == "FFFFF·····"


def test_py_spy_stacks_become_a_profile() -> None:
    text = "MainThread;main (a.py:3);work (b c.py:9) 70\nThread-1;idle (a.py:1) 30\n"
    profile = parse(text, 5, 100.0)
    found = document([profile])
    assert found["steps"] == 0
    assert found["ranks"][0]["functions"] == [{"function": "work (b c.py:9)", "share": 1.0}]
    assert "py-spy" in found["ranks"][0]["missing"]["phase"]


def test_command_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profiles: list[RankProfile]
) -> None:
    import msgspec

    for one in profiles:
        records = [one.header, *one.samples["basic"], *one.stacks.values(), *one.stack_samples]
        text = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        (tmp_path / f"rank{one.header.rank}.jsonl").write_bytes(text + b'{"half')
    assert len(read_profile(tmp_path)) == 2
    html, traced = tmp_path / "r.html", tmp_path / "t.json"
    html.symlink_to("behind.html")  # stays
    line = ["prof", "report", str(tmp_path), "--html", str(html), "--trace", str(traced)]
    assert run_line([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 0
    assert (html.is_symlink(), html.read_text()[:15]) == (True, "<!doctype html>")
    assert json.loads(traced.read_bytes())["traceEvents"]
    assert run_line(["prof", "compare", str(tmp_path), str(tmp_path)]) == 0
    assert "within the noise" in capsys.readouterr().out
    assert run_line(["prof", "report", str(tmp_path / "none")]) == 1
    assert "holds no profile" in capsys.readouterr().err
    (tmp_path / "rank0.jsonl").write_bytes(b"{}\n")
    with pytest.raises(ProfileError, match="line 1"):
        read_profile(tmp_path)
    assert run_line(["prof", "attach", "x1"]) == 1
    assert "expected process ids, or one task id" in capsys.readouterr().err


def test_the_original_form() -> None:
    line = ["train.py", "--lr", "1", "--time", "120", "--recorders", "all"]
    assert original_form(line) == [
        "run", "--time", "120", "--recorders", "all", "train.py", "--lr", "1",
    ]  # fmt: skip
    assert original_form(["trace", "train.py"]) == ["trace", "train.py"]


def test_recorders_by_name() -> None:
    assert chosen("basic, phase,trace") == (["basic"], ["phase", "trace"])
    assert chosen("all")[1] == ["phase", "trace"]
    with pytest.raises(ConfigError, match="invalid recorder 'x': expected all, or some of basic"):
        chosen("x")
    with pytest.raises(ConfigError, match="interval"):
        chosen("basic", {"basic": 0})
