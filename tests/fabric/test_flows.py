"""Max-min fair rates against arithmetic, and the storage traffic of the paper."""

import json

import numpy as np
import pytest
from tests.draws import cases, seeds

from fireflyer.cli.app import run_line
from fireflyer.errors import FabricError
from fireflyer.fabric.flows import PORT_BYTES_S, fair_rates, traffic
from fireflyer.fabric.topologies import fat_tree2, two_zone


def rates(paths: list[list[int]], capacities: list[float]) -> list[float]:
    flows = [flow for flow, path in enumerate(paths) for _ in path]
    links = [link for path in paths for link in path]
    found: list[float] = fair_rates(
        np.array(flows, np.int64), np.array(links, np.int64), np.array(capacities), len(paths)
    ).tolist()
    return found


@pytest.mark.parametrize(
    ("paths", "capacities", "wanted"),
    [
        ([[0, 1, 2], [0], [1], [2]], [1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5]),  # parking lot
        ([[0, 1], [1, 2], [2, 0]], [1.0, 2.0, 3.0], [0.5, 1.5, 0.5]),  # triangle
        ([[0], [0], [0, 1], [1]], [3.0, 10.0], [1.0, 1.0, 1.0, 9.0]),  # two bottlenecks
        ([[0]] * 7, [1.0], [1 / 7] * 7),
        ([], [1.0], []),
    ],
)
def test_rates_by_hand(
    paths: list[list[int]], capacities: list[float], wanted: list[float]
) -> None:
    assert rates(paths, capacities) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("seed", seeds("fabric max-min", 60))
def test_every_flow_has_a_bottleneck(seed: int) -> None:
    """Rates are max-min fair if and only if each flow has the top rate of some full link of its path."""
    random = np.random.default_rng(seed)
    for _ in range(cases(20)):
        links, count = int(random.integers(1, 12)), int(random.integers(1, 30))
        uses = random.random((count, links)) < 0.4
        uses[np.arange(count), random.integers(0, links, count)] = True
        capacities = random.random(links) + 0.1
        flow, link = np.nonzero(uses)
        found = fair_rates(flow, link, capacities, count)
        load = uses.T @ found
        assert np.all(load <= capacities * (1 + 1e-9))
        full = load >= capacities * (1 - 1e-9)
        top = np.where(uses, found[:, None], 0).max(axis=0)
        assert np.all(np.any(uses & full & (found[:, None] >= top * (1 - 1e-9)), axis=1))


def test_a_flow_without_a_link_is_an_error() -> None:
    with pytest.raises(ValueError, match="uses no link"):
        fair_rates(np.array([0]), np.array([0]), np.array([1.0]), 2)


def test_traffic_of_the_paper_network(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["net", "flows", "--preset", "fire-flyer2", "--json", "--traffic"]
    assert run_line([*line, "ring"]) == 0
    ring = json.loads(capsys.readouterr().out)
    assert (ring["flows"], ring["least_bytes_s"]) == (1560, PORT_BYTES_S)
    assert run_line([*line, "storage"]) == 0
    storage = json.loads(capsys.readouterr().out)
    assert (storage["flows"], storage["ceiling_bytes_s"]) == (1200 * 12, 9e12)
    assert 0.8 < storage["of_ceiling"] <= 1
    assert run_line([*line, "gossip"]) == 1
    assert "expected one of storage, ring, random" in capsys.readouterr().err


def test_a_network_without_stores_has_no_storage_traffic() -> None:
    with pytest.raises(FabricError, match="no storage nodes"):
        traffic(fat_tree2(8, 4), "storage")
    assert len(traffic(two_zone(8, 1, 4, 2), "storage").senders) == 8 * 12
