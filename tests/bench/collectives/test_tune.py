"""Tuning: what is picked, the rules that come of it, and a run on virtual nodes and in a lab."""

import json
from pathlib import Path

import pytest

from fireflyer._native import hfreduce as native
from fireflyer._native.hfreduce import ANY_BYTES, Kind
from fireflyer.bench.__main__ import app
from fireflyer.bench.collectives import tune
from fireflyer.bench.collectives.tune import Choice
from fireflyer.bench.harness.ranks import Timing
from fireflyer.hfreduce import rules
from fireflyer.lab import namespaces
from fireflyer.program import run_app

RING, TREE, DIRECT = (Choice(name, 0) for name in ("ring", "tree", "direct"))


def run(*arguments: str) -> int:
    return run_app(app, "fireflyer bench", ["tune", *arguments])


def test_noise_does_not_change_the_choice() -> None:
    assert tune.pick({RING: 104, TREE: 100, DIRECT: 300}, RING) == RING
    assert tune.pick({RING: 106, TREE: 100, DIRECT: 300}, RING) == TREE
    assert tune.pick({RING: 106, TREE: 100, DIRECT: 90}, TREE) == DIRECT


def test_every_algorithm_is_tried_once() -> None:
    assert tune.choices("allreduce", RING, 1) == [RING, TREE, DIRECT]
    one = Choice("direct", 1)
    assert tune.choices("allreduce", one, 1) == [one, Choice("ring", 1), Choice("tree", 1)]
    both = tune.choices("reduce", Choice("tree", 1), 4)
    assert both[0] == Choice("tree", 1)
    assert sorted(map(str, both)) == [
        "chain, 1 lane",
        "chain, all lanes",
        "tree, 1 lane",
        "tree, all lanes",
    ]


def test_rules_change_half_way_between_sizes() -> None:
    picked = {1 << 10: DIRECT, 1 << 12: DIRECT, 1 << 16: TREE, 1 << 20: RING, 1 << 24: RING}
    *before, first, second, last = tune.rules_for("allreduce", 40, picked)
    assert before == []  # no rule of the engine's is for more than 40 hosts
    assert (first, second) == (
        DIRECT.rule("allreduce", 40, 1 << 14),
        TREE.rule("allreduce", 40, 1 << 18),
    )
    assert last == RING.rule("allreduce", 40, ANY_BYTES)


@pytest.mark.parametrize("kind", sorted(rules.ALGORITHMS))
def test_clusters_that_are_larger_keep_the_engine_s_own_choice(kind: str) -> None:
    other = Choice(rules.ALGORITHMS[kind][-1], 1)
    table = tune.rules_for(kind, 3, {1 << 20: other})
    whole = Kind[kind.upper()]
    own = [rule for rule in native.default_rules() if rule.kind == whole and rule.hosts > 3]
    for hosts in sorted({rule.hosts for rule in own}):
        for rule in (rule for rule in own if rule.hosts <= hosts):
            assert native.choose_rule(table, whole, hosts, rule.bytes) in own
    assert native.choose_rule(table, whole, 3, 1) == other.rule(kind, 3, ANY_BYTES)
    assert native.choose_rule(table, whole, 2, 1) == native.choose_rule([], whole, 2, 1)


def test_conclusions() -> None:
    spec = tune.Spec(2, 1, False, None, ("allreduce",), (1 << 20,), 3)
    ring, tree = ([Timing(wall, 1.0) for wall in walls] for walls in ((50, 90, 52), (40, 26, 25)))
    tuned = tune.conclude(spec, {("allreduce", 1 << 20): {RING: ring, TREE: tree}})
    assert tuned.changes == [
        "allreduce of 1 MiB: tree, all lanes instead of ring, all lanes, 2.00x as fast"
    ]
    (row,) = tuned.rows
    assert (row.ours, row.peer_value, row.peer) == (26, 52, "default: ring, all lanes")
    assert list(tune.described(tuned.table.rules))[-1] == (
        "allreduce    2 hosts and more, any size: tree, all lanes"
    )
    assert tuned.table.hosts == 2
    assert "virtual nodes, 2x1" in tuned.table.machine


@pytest.mark.full
def test_over_virtual_nodes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "table.toml", tmp_path / "report.json"
    arguments = ["--nodes", "2", "--ranks-per-host", "2", "--sizes", "1M,1K", "--rounds", "1"]
    assert run(*arguments, "--out", str(out), "--output", str(report)) == 0
    shown = capfd.readouterr().out
    table = rules.load(str(out))
    assert table.hosts == 2
    for line in tune.described(table.rules):
        assert line in shown
    assert f"FIREFLYER_HFREDUCE_TABLE={out}" in shown.replace("\n", "")
    assert "changes" in shown
    cases = [row["case"] for row in json.loads(report.read_text())["rows"]]
    assert [case.split(":")[0] for case in cases] == [
        f"{kind}, virtual nodes, 2x2, {size}"
        for kind in ("allreduce", "broadcast", "reduce")
        for size in ("1 KiB", "1 MiB")
    ]


@pytest.mark.netns
def test_in_a_lab(tmp_path: Path) -> None:
    if reason := namespaces.why_not():
        pytest.skip(f"needs network namespaces: {reason}")
    spec = tune.Spec(2, 1, True, "1gbit", ("reduce",), (1 << 16,), 1)
    tuned = tune.run(spec)
    assert [row.case.split(":")[0] for row in tuned.rows] == ["reduce, 2x1, 64 KiB"]
    assert "lab, 1gbit limit" in tuned.table.machine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1gbit"], "--rate needs --hosts"),
        (["--hosts", "2", "--nodes", "2"], "exclude each other"),
        (["--kinds", "gather"], "invalid name 'gather': expected one of"),
        (["--out", "/nowhere/at/all.toml"], "its folder does not exist"),
    ],
)
def test_wrong_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
