"""Counts, port budgets and Tables II and III to the printed digit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fireflyer.cli.app import run_line
from fireflyer.errors import FabricError
from fireflyer.fabric import plan
from fireflyer.fabric.catalogue import Catalogue
from fireflyer.fabric.net import Builder, Net
from fireflyer.fabric.topologies import (
    Subtree,
    fat_tree2,
    fat_tree3,
    preset,
    two_zone,
    zone_budget,
)

PARTS = Catalogue.read()


def planned(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    assert run_line(["net", "plan", *line, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("name", "switches", "gpus", "ports", "price", "watts"),
    [
        ("fire-flyer2", 122, 10_000, 1600, 11_600, 3_125_000),
        ("fat-tree3", 200, 10_000, 1600, 11_850, 3_125_000),
        ("dgx-a100", 1320, 10_000, 10_000, 23_000, 5_250_000),
        ("multi-plane", 768, 32_768, 32_768, None, None),
    ],
)
def test_presets(
    capsys: pytest.CaptureFixture[str],
    name: str, switches: int, gpus: int, ports: int, price: int | None, watts: int | None,
) -> None:  # fmt: skip
    found = planned(capsys, "--preset", name)
    assert (found["switches"], found["gpus"], found["host_ports"]) == (switches, gpus, ports)
    assert (found["relative_price"], found["power_w"]) == (price, watts)


def test_table_two_to_the_printed_digit() -> None:
    ratios = plan.table_two(PARTS)
    assert f"{ratios['relative_performance']:.0%}" == "83%"
    assert f"{ratios['relative_price']:.0%}" == "60%"
    assert f"{ratios['cost_performance']:.2f}" == "1.38"
    assert f"{1 - ratios['power']:.0%}" == "40%"


def test_table_three_and_its_decomposition() -> None:
    fire_flyer, fat_tree, dgx = plan.table_three(PARTS)
    assert f"{fire_flyer['of_dgx']:.3f}" == "0.504"
    assert f"{1 - fire_flyer['network_price'] / fat_tree['network_price']:.1%}" == "41.7%"
    per_switch = [f"{row['price_per_switch']:.2f}" for row in (fire_flyer, fat_tree, dgx)]
    assert per_switch == ["2.87", "3.00", "3.03"]
    saved = dgx["relative_price"] - fire_flyer["relative_price"]
    servers = dgx["server_price"] - fire_flyer["server_price"]
    assert (saved, f"{servers / saved:.0%}") == (11_400, "68%")


def test_the_port_budget_names_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FabricError, match=r"625 \+ 180 = 805 ports .* 800 ports; 1,240 .*1,200"):
        zone_budget(1250, 180)
    budget = zone_budget(1200, 180)
    assert (budget.host_ports, budget.endpoints, budget.cross, budget.spare) == (800, 780, 20, 0)
    assert planned(capsys, "--nodes", "1000", "--storage", "100")["spare_per_zone"] == 180
    assert run_line(["net", "plan", "--nodes", "1250", "--storage", "180"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    for line in (["--compare", "--storage", "60"], ["--preset", "fat-tree2", "--cross", "8"]):
        assert run_line(["net", "plan", *line]) == 1
        assert "--storage and --cross need --nodes N" in capsys.readouterr().err
    with pytest.raises(FabricError, match="1,200 nodes fit"):
        zone_budget(1210, 180)


def test_dollars_built_on_an_unknown_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FabricError, match="dollars of node 'pcie-a100' is unknown"):
        plan.dollars("fire-flyer2", PARTS)
    path = tmp_path / "parts.toml"
    path.write_text("[node.a]\ndollars = 3\n[node.b]\ndollars = { value = -1, source = 'x' }\n")
    parts = Catalogue.read(path)
    with pytest.raises(FabricError, match="has no source"):
        parts.value("node", "a", "dollars")
    with pytest.raises(FabricError, match="expected a number"):
        parts.value("node", "b", "dollars")
    with pytest.raises(FabricError, match=r"no section \[node\.c\]"):
        parts.value("node", "c", "dollars")
    path.write_text("[node")
    assert run_line(["net", "plan", "--compare", "--catalogue", str(path)]) == 1
    assert "cannot read the catalogue" in capsys.readouterr().err


def whole(net: Net) -> None:
    """Checks that each cable has two ends, no port two cables, and all of the net is one piece."""
    rows, columns = np.nonzero(net.peers >= 0)
    peers, ports = net.peers[rows, columns], net.peer_ports[rows, columns]
    assert np.array_equal(net.peers[peers, ports], rows)
    assert np.array_equal(net.peer_ports[peers, ports], columns)
    assert not np.any((net.hosts >= 0) & (net.peers >= 0))
    assert np.all(columns <= net.radix[rows])
    assert np.all(net.components() == 0)
    assert np.all(net.attached[0] >= 0)


@pytest.mark.parametrize("name", ["fire-flyer2", "fat-tree2", "fat-tree3", "dgx-a100"])
def test_builders_are_whole(name: str) -> None:
    [net] = preset(name)
    whole(net)


def test_endpoints_of_each_kind_are_even_over_the_leaves() -> None:
    net = two_zone(1200, 180)
    at, _ = net.attached
    stores = np.array([name.startswith("store") for name in net.endpoints])
    leaves = net.levels == 0
    assert set(np.bincount(at[stores], minlength=122)[leaves]) == {4, 5}
    assert set(np.bincount(at[~stores], minlength=122)[leaves]) == {15}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fat_tree2(801), "801 host ports do not fit .* at most 800"),
        (lambda: fat_tree2(10, 7), "invalid radix 7"),
        (lambda: fat_tree2(640, subtree=Subtree(257, 8, 1e9)), "at most 620 fit"),
        (lambda: fat_tree2(6, 8, subtree=Subtree(400, 2, 1e9)), "at most 0 fit"),
        (lambda: fat_tree2(6, 8, subtree=Subtree(4, 5, 1e9)), "invalid subtree of .* 1 to 4 links"),
        (lambda: fat_tree3(0), "invalid number of hosts 0"),
        (lambda: fat_tree3(10_000, cores=240), "use at least 260"),
        (lambda: fat_tree3(10_000, cores=250), "expected a multiple of 20"),
        (lambda: preset("torus"), "invalid preset 'torus'"),
        (lambda: zone_budget(10, 0, cross=3), "even number of links"),
        (lambda: Builder().build(), "no switch"),
        (lambda: Builder().switch("a", 255, 0, 0), "expected 1 to 254"),
    ],
)
def test_refusals(call: Any, says: str) -> None:
    with pytest.raises(FabricError, match=says):
        call()


def test_a_builder_refuses_what_a_port_cannot_do() -> None:
    builder = Builder()
    one, other = builder.switch("a", 2, 0, 0), builder.switch("b", 2, 0, 0)
    builder.link(one, other, 1, 2)
    with pytest.raises(FabricError, match="port 1 of switch 'a' has two cables"):
        builder.endpoint("n0/1", one, 1)
    with pytest.raises(FabricError, match="has no port 3"):
        builder.endpoint("n0/1", one, 3)
    builder.endpoint("n0/1", one)
    with pytest.raises(FabricError, match="endpoint 'n0/1' appears twice"):
        builder.endpoint("n0/1", other)
    with pytest.raises(FabricError, match="no free port"):
        builder.endpoint("n1/1", one)
    with pytest.raises(FabricError, match="switch 'a' appears twice"):
        builder.switch("a", 2, 0, 0)
