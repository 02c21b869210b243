"""Rates and ends of flows against arithmetic, traffic of the paper, and failures on the way."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tests.draws import cases, seeds

from fireflyer._native import fabric as native
from fireflyer.cli.app import run_line
from fireflyer.errors import FabricError
from fireflyer.fabric.flows import Failure, Paths, fair_rates, run_flows
from fireflyer.fabric.net import HDR_BYTES_S
from fireflyer.fabric.topologies import fat_tree2, two_zone
from fireflyer.fabric.traffic import KINDS, traffic, tree_parents


def paths(uses: list[list[int]]) -> Paths:
    begin = np.cumsum([0, *(len(one) for one in uses)]).astype(np.int64)
    return Paths(begin, np.array([link for one in uses for link in one], np.int32))


@pytest.mark.parametrize(
    ("uses", "capacities", "wanted"),
    [
        ([[0, 1, 2], [0], [1], [2]], [1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5]),  # parking lot
        ([[0, 1], [1, 2], [2, 0]], [1.0, 2.0, 3.0], [0.5, 1.5, 0.5]),  # triangle
        ([[0], [0], [0, 1], [1]], [3.0, 10.0], [1.0, 1.0, 1.0, 9.0]),  # two bottlenecks
        ([[0]] * 7, [1.0], [1 / 7] * 7),
        ([], [1.0], []),
    ],
)
def test_rates_by_hand(uses: list[list[int]], capacities: list[float], wanted: list[float]) -> None:
    found = fair_rates(paths(uses), np.array(capacities))
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("seed", seeds("fabric max-min", 60))
def test_every_flow_has_a_bottleneck_at_any_time(seed: int) -> None:
    """Rates are max-min fair if and only if each flow has the top rate of some full link of its path."""
    random = np.random.default_rng(seed)
    for _ in range(cases(20)):
        links, count = int(random.integers(1, 12)), int(random.integers(1, 60))
        uses = random.random((count, links)) < 0.4
        uses[np.arange(count), random.integers(0, links, count)] = True
        capacities = random.random(links) + 0.1
        way = paths([np.flatnonzero(row).tolist() for row in uses])
        solver = native.Flows(capacities, way.begin, way.links, random.random(count) + 0.1)
        while np.isinf(solver.ends()).any():
            found = solver.rates()
            running = np.isinf(solver.ends())
            assert not found[~running].any()
            load = uses.T @ found
            assert np.all(load <= capacities * (1 + 1e-9))
            full = load >= capacities * (1 - 1e-9)
            top = np.where(uses, found[:, None], 0).max(axis=0)
            held = np.any(uses & full & (found[:, None] >= top * (1 - 1e-9)), axis=1)
            assert held[running].all()
            solver.run(solver.now + float(random.random()), 0.0)


def test_a_flow_without_a_link_is_an_error() -> None:
    with pytest.raises(ValueError, match="uses no link"):
        fair_rates(paths([[0], []]), np.array([1.0]))
    with pytest.raises(ValueError, match="does not exist"):
        fair_rates(paths([[1]]), np.array([1.0]))


def test_traffic_of_the_paper_network(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ["net", "flows", "--preset", "fire-flyer2", "--json", "--traffic"]
    assert run_line([*line, "ring"]) == 0
    ring = json.loads(capsys.readouterr().out)
    assert (ring["flows"], ring["least_bytes_s"]) == (1560, HDR_BYTES_S)
    page = tmp_path / "flows.html"
    assert run_line([*line, "storage", "--bytes", "48M", "--html", str(page)]) == 0
    storage = json.loads(capsys.readouterr().out)
    assert (storage["flows"], storage["ceiling_bytes_s"]) == (1200 * 12, 9e12)
    assert 0.8 < storage["of_ceiling"] <= 1
    assert storage["finish_s"] >= 1200 * 48 * 2**20 / 9e12
    assert page.read_text().count("<svg") == 5  # four maps of the cables, and the ends
    for wrong, told in (
        (["gossip"], "expected one of storage, checkpoint, ring"),
        (["ring", "--bytes", "1X"], "--bytes: invalid size '1X'"),
        (["ring", "--cuts", "1"], "need --bytes"),
        (["ring", "--bytes", "1M", "--fail", "Z0S3"], "expected NAME"),
        (["ring", "--bytes", "1M", "--fail", "Z9S3@1ms"], "no switch 'Z9S3'"),
        (["ring", "--bytes", "1M", "--fail", "Z0S3:41@1ms"], "port 41 of Z0S3 has no cable"),
        (["ring", "--bytes", "1M", "--fail", "Z0S3@2ms-1ms"], "ends before it begins"),
        (["tree", "--nodes", "5000"], "expected 2 to 1200"),
    ):
        assert run_line([*line, *wrong]) == 1
        assert told in capsys.readouterr().err


def test_a_network_without_stores_has_no_storage_traffic() -> None:
    with pytest.raises(FabricError, match="no storage nodes"):
        traffic(fat_tree2(8, 4), "storage")
    assert len(traffic(two_zone(8, 1, 4, 2), "storage").senders) == 8 * 12


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_each_kind(kind: str) -> None:
    """Each compute node reads, writes or sends what its kind says, and no flow leads to its sender."""
    net = two_zone(12, 2, 8, 4)
    of = traffic(net, kind)
    assert not np.any(of.senders == of.receivers)
    sent = np.bincount(of.senders, of.weights, len(net.endpoints))
    got = np.bincount(of.receivers, of.weights, len(net.endpoints))
    store = np.array([name.startswith("store") for name in net.endpoints])
    if kind == "storage":
        assert np.allclose(got[~store], 1)
    elif kind == "checkpoint":
        assert np.allclose(sent[~store], 1)
        assert math.isclose(got[store].sum(), 2 * 12)  # each byte reaches two stores
    elif kind == "all-to-all":
        assert np.allclose(sent[~store], 11 / 12)
    elif kind == "tree":
        assert np.array_equal(sent, got)
        assert math.isclose(
            sent.sum(), 2 * 11
        )  # each tree has 11 edges, half of the bytes each way
    else:
        assert set(sent.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 33, 600, 601])
def test_double_binary_trees(count: int) -> None:
    first, second = tree_parents(count), tree_parents(count, second=True)
    inner = []
    for parents in (first, second):
        assert np.count_nonzero(parents < 0) == 1
        depth = 0
        at = np.arange(count)
        while (at >= 0).any():
            at = np.where(at >= 0, parents[at], -1)
            depth += 1
        assert depth <= math.ceil(math.log2(count)) + 2
        inner.append(np.bincount(parents[parents >= 0], minlength=count))
        assert inner[-1].max() <= 2 or count == 1
    assert np.all((inner[0] == 0) | (inner[1] == 0) | (inner[0] + inner[1] <= 3))


def test_trees_cross_between_zones_once_each() -> None:
    """A plain double binary tree of 1,200 ranks has 18 edges between its halves; ours has 2."""
    net = two_zone(1200, 0)
    of = traffic(net, "tree")
    zones = net.endpoint_zones
    assert np.count_nonzero(zones[of.senders] != zones[of.receivers]) == 2 * 2
    parents = tree_parents(1200)
    children = np.flatnonzero(parents >= 0)
    plain = np.count_nonzero((children < 600) != (parents[children] < 600))
    assert plain > 2


def test_flows_wait_for_new_routes_after_a_failure() -> None:
    net = fat_tree2(8, 4)
    of = traffic(net, "ring")
    whole = run_flows(net, of, HDR_BYTES_S)  # a second each
    assert whole.ends_s.tolist() == pytest.approx([1.0] * 8)
    spine = net.switches.index("S0")
    failed = run_flows(net, of, HDR_BYTES_S, [Failure(0.5, (spine,))], reroute_s=0.25)
    late = failed.ends_s > 1.0 + 1e-9
    assert 0 < late.sum() < 8
    # A flow stands still for 0.25 s, then shares the spine that remains.
    assert failed.ends_s[late].min() >= 1.25 - 1e-9
    back = run_flows(net, of, HDR_BYTES_S, [Failure(0.5, (spine,), until_s=0.6)], reroute_s=5.0)
    assert back.ends_s.max() == pytest.approx(1.1)


def test_a_host_without_a_cable_is_stranded() -> None:
    net = fat_tree2(8, 4)
    leaf = int(net.attached[0][0])
    of = traffic(net, "ring")
    failed = run_flows(net, of, HDR_BYTES_S, [Failure(0.5, (leaf,))], reroute_s=0.1)
    lost = np.isin(net.attached[0][of.senders], leaf) | np.isin(net.attached[0][of.receivers], leaf)
    assert np.array_equal(np.isinf(failed.ends_s), lost)
    repaired = run_flows(net, of, HDR_BYTES_S, [Failure(0.5, (leaf,), until_s=2.0)], reroute_s=0.1)
    assert repaired.ends_s.max() == pytest.approx(2.6)  # tables follow the cables 0.1 s later
