"""Slurm's topology files and the order of a job's hosts."""

import json
import re
from pathlib import Path

import pytest

from fireflyer.cli.app import run_line
from fireflyer.errors import FabricError
from fireflyer.fabric.job_order import job_order
from fireflyer.fabric.net import Builder
from fireflyer.fabric.slurm import hostlist, topology_conf, topology_yaml
from fireflyer.fabric.topologies import fat_tree2, preset, two_zone


def test_topology_of_slurm() -> None:
    net = two_zone(8, 1, 4, 2)
    assert topology_conf(net).splitlines() == [
        "SwitchName=Z0L0 Nodes=z0n0",
        "SwitchName=Z0L1 Nodes=z0n1",
        "SwitchName=Z0L2 Nodes=z0n2",
        "SwitchName=Z0L3 Nodes=z0n3",
        "SwitchName=Z1L0 Nodes=z1n0",
        "SwitchName=Z1L1 Nodes=z1n1",
        "SwitchName=Z1L2 Nodes=z1n2",
        "SwitchName=Z1L3 Nodes=z1n3",
        "SwitchName=zone0 Switches=Z0L[0-3]",
        "SwitchName=zone1 Switches=Z1L[0-3]",
        "SwitchName=zones Switches=zone[0-1]",
    ]
    yaml = topology_yaml(net)
    assert "      - switch: zone1\n        children: Z1L[0-3]\n" in yaml
    assert "      - switch: Z0L2\n        nodes: z0n2\n" in yaml


def test_every_compute_node_has_one_place_and_storage_none() -> None:
    lines = topology_conf(preset("fire-flyer2")[0]).splitlines()
    spans = [re.findall(r"(z\d)n\[(\d+)-(\d+)\]", line) for line in lines]
    found = [(z, n) for line in spans for z, a, b in line for n in range(int(a), int(b) + 1)]
    assert sorted(found) == [(f"z{z}", n) for z in range(2) for n in range(600)]
    builder = Builder()
    for number in range(2):
        builder.endpoint(f"a/{number + 1}", builder.switch(f"s{number}", 2, 0, 0))
    with pytest.raises(FabricError, match="tree would be empty"):
        topology_conf(builder.build())


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n0", "n1", "n2", "n7", "login"], "n[0-2,7],login"),
        (["n3"], "n3"),
        (["n10", "n9", "a1"], "n[9-10],a1"),
        (["n01", "n1"], "n1,n01"),
    ],
)
def test_hostlists(names: list[str], text: str) -> None:
    assert hostlist(names) == text


def test_order_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("z1n3\nz0n40\nz0n2\nz1n2\nz0n41\n\n")
    assert run_line(["net", "order", "--preset", "fire-flyer2", "--job", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hosts"] == ["z0n2", "z0n40", "z0n41", "z1n2", "z1n3"]
    assert found["zones"] == ["plane0-zone0"] * 3 + ["plane0-zone1"] * 2
    assert (found["zone_count"], found["leaf_count"]) == (2, 3)
    path.write_text("z1n3\nnobody\n")
    assert run_line(["net", "order", "--preset", "fire-flyer2", "--job", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_jobs_that_have_no_order() -> None:
    net = fat_tree2(8, 4)
    with pytest.raises(FabricError, match=r"'x' has no cable in the network; 2 hosts .* 1 found"):
        job_order([net], ["n0", "x"])
    with pytest.raises(FabricError, match="'n0' appears twice"):
        job_order([net], ["n0", "n1", "n0"])
    with pytest.raises(FabricError, match="no hosts"):
        job_order([net], [])
