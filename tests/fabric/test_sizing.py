"""Sizes by arithmetic against networks that are wired, and pages with drawings."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fireflyer.cli.app import run_line
from fireflyer.errors import FabricError
from fireflyer.fabric.catalogue import Catalogue
from fireflyer.fabric.plan import counts
from fireflyer.fabric.report import FIGURE_7A, allreduce_model
from fireflyer.fabric.sizing import network_price, sized
from fireflyer.fabric.topologies import fat_tree2, fat_tree3, two_zone

PARTS = Catalogue.read()


def test_sizes_equal_the_wired_networks() -> None:
    for size, net in (
        (sized("two-zone", 1200, 180), two_zone(1200, 180)),
        (sized("fat-tree2", 800), fat_tree2(800)),
        (sized("fat-tree3", 1600), fat_tree3(1600)),
        (sized("fat-tree3", 10_000), fat_tree3(10_000)),
        (sized("fat-tree3", 96, radix=8), fat_tree3(96, radix=8)),
    ):
        wired = counts([net])
        assert size.switches == wired["switches"], size
        between = sum(count for name, count in size.cables.items() if name != "host")
        assert between == wired["cables"], size
    assert sized("multi-plane", 32_768, radix=128).switches == 768


@pytest.mark.parametrize("nodes", [1, 20, 21, 40, 100, 399, 400, 401, 799, 800])
def test_a_tree_has_room_for_its_nodes_and_full_bandwidth(nodes: int) -> None:
    size = sized("fat-tree2", nodes)
    leaves = -(-nodes // 20)
    assert size.host_ports >= nodes
    assert size.switches == 1 or (size.switches - leaves) * 40 >= leaves * 20
    assert network_price(size, PARTS) == pytest.approx(size.switches * 350 / 122)


def test_what_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FabricError, match="at most 800 fit"):
        sized("fat-tree2", 801)
    with pytest.raises(FabricError, match="expected one of fat-tree2"):
        sized("ring", 8)
    with pytest.raises(FabricError, match="even number of ports"):
        sized("fat-tree2", 8, radix=5)
    assert (
        run_line(["net", "plan", "--compare", "--nodes", "1300", "--storage", "60", "--json"]) == 0
    )
    rows = {row["topology"]: row for row in json.loads(capsys.readouterr().out)["networks"]}
    assert rows["fat-tree2"]["switches"] is None
    assert "at most 800 fit" in rows["fat-tree2"]["note"]
    assert rows["two-zone"]["switches"] == 116
    assert rows["multi-plane"]["network_price"] is None


def test_the_model_of_figure_7_is_a_ceiling() -> None:
    """A node of a tree sends twice the bytes through its port; two nodes send them once."""
    model = allreduce_model()
    assert model[2] == pytest.approx(25.0)
    assert all(model[nodes] == pytest.approx(12.5) for nodes in (16, 64, 128))
    assert all(model[nodes] > paper for nodes, paper in FIGURE_7A.items())


@pytest.mark.parametrize(
    "line",
    [
        "plan --preset fire-flyer2", "plan --preset multi-plane", "plan --nodes 100 --storage 8",
        "plan --compare --nodes 500", "plan --compare", "verify --preset fat-tree2",
        "flows --preset fat-tree2 --traffic tree --nodes 16 --bytes 1M --cuts 2 --reroute 1ms",
    ],
)  # fmt: skip
def test_pages_are_whole(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert run_line(["net", *line.split(), "--html", str(page), "--json"]) == 0
    json.loads(capsys.readouterr().out)
    text = page.read_text()
    assert "http" not in text.replace("http-equiv", "")  # it loads nothing
    ElementTree.fromstring("<p>" + text[text.index("<h1>") : text.index("</body>")] + "</p>")
    assert "<svg" in text
    assert run_line(["net", *line.split(), "--html", str(tmp_path / "none" / "page.html")]) == 1
    assert "cannot write" in capsys.readouterr().err
