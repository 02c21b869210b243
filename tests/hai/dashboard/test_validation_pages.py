"""The pages about validations: the map of the fleet, a node's history, and what is judged there."""

import re
from collections.abc import Callable, Iterator
from xml.etree import ElementTree

import pytest
from tests.hai.dashboard.conftest import Tags, Visitor
from tests.hai.dashboard.test_pages import HOSTILE, check_markup
from tests.hai.server.conftest import Server

from fireflyer.hai.dashboard.charts import validation_charts as charts
from fireflyer.hai.model.validations import Ended, Finding, Returned, Started, Suspected
from fireflyer.hai.validation.health import Health, health, noteworthy
from fireflyer.hai.validation.journal import Journal

MakeVisitor = Callable[..., Visitor]

NOW = 1_800_000_000.0


def ended(node: str, speed: float, wall: float = NOW, *, gemm: str = "passed") -> Ended:
    return Ended(
        node=node, wall=wall, task="t9", trigger="weekly",
        findings=(
            Finding(name="disk write", status="passed", value=speed, unit="MB/s"),
            Finding(name="gemm", status="failed" if gemm != "passed" else "passed", value=50.0,
                    unit="GFLOP/CPU-s", reason="" if gemm == "passed" else gemm),
            Finding(name="gpu gemm", status="not run", reason="no GPU is visible"),
        ),
    )  # fmt: skip


def fleet(count: int) -> dict[str, Ended]:
    """Nodes of nearly equal speed; the fourth lost a third of it, the second failed a product."""
    found = {f"n{i}": ended(f"n{i}", 1000.0 + i % 7) for i in range(count)}
    return found | {"n3": ended("n3", 660.0), "n1": ended("n1", 1001.0, gemm="2 bits differ")}


def cells(svg: str) -> Iterator[tuple[str, str]]:
    """Yields the tooltip and the mark of each cell."""
    for group in ElementTree.fromstring(svg).iter("g"):
        title, mark = group.find("title"), group.find("text")
        assert title is not None
        yield title.text or "", (mark.text or "") if mark is not None else ""


def test_a_slow_node_and_a_failed_one_are_marked() -> None:
    found = health(fleet(20))
    assert found.figures == ("disk write", "gemm", "gpu gemm")
    assert [(c.node, c.figure, c.standing) for c in noteworthy(found, 9)] == [
        ("n1", "gemm", "failed"), ("n3", "disk write", "worse"),
    ]  # fmt: skip
    assert found.cells["disk write"]["n3"].loss == pytest.approx(0.34, abs=0.01)
    shown = list(cells(charts.fleet_map(found, None)))
    assert len(shown) == 60
    assert [tip for tip, mark in shown if mark == "×"] == [
        "n1, gemm: failed, 50 GFLOP/CPU-s, 0.0% above the fleet, 2 bits differ"
    ]
    (slow,) = [tip for tip, mark in shown if mark == "!"]
    assert slow.startswith("n3, disk write: worse, 660 MB/s, 34.")
    assert sum(mark == "·" for _, mark in shown) == 20


@pytest.mark.parametrize("count", [1, 2])
def test_without_a_criterion_nobody_is_slow(count: int) -> None:
    found = health({f"n{i}": ended(f"n{i}", 100.0 * (i + 1)) for i in range(count)})
    assert noteworthy(found, 9) == []


def test_a_column_of_many_nodes_shows_the_worst_one() -> None:
    found = health(fleet(1000))
    whole = charts.fleet_map(found, None)
    assert len(list(cells(whole))) == 3 * charts.MOST_COLUMNS
    assert whole.count('href="/dashboard/validations?part=0"') == 3
    assert {mark for tip, mark in cells(whole) if tip.startswith(("n1,", "n3,"))} == {"×", "!"}
    part = charts.fleet_map(found, 0)
    assert len(list(cells(part))) == 3 * 25
    assert 'href="/dashboard/validations/n3"' in part
    with pytest.raises(IndexError):
        charts.fleet_map(found, 40)


def test_figures_of_counts_have_no_scale() -> None:
    zero = Finding(name="cpu throttling", status="passed", value=0.0, unit="events", better="less")
    found = health(
        {f"n{i}": Ended(node=f"n{i}", wall=NOW, task="t1", trigger="weekly", findings=(zero,))
         for i in range(5)}
    )  # fmt: skip
    assert {cell.loss for cell in found.cells["cpu throttling"].values()} == {None}
    assert charts.fleet_map(found, None).count('fill-opacity="0.06"') == 5


def test_an_empty_fleet_is_no_error() -> None:
    assert health({}) == Health(nodes=(), figures=(), medians={}, cells={})


# -- over HTTP -------------------------------------------------------------------------------------


def seed(server: Server) -> None:
    """Writes a history: ten nodes, and one that failed, was drained, passed and returned."""
    server.home.mkdir(mode=0o700)
    journal = Journal(server.home)
    for number in range(10):
        name = "n0" if number == 0 else f"{HOSTILE[:40]}{number}"
        journal.add(ended(name, 1000.0 + number, NOW - 8 * 86_400.0))
    journal.add(Suspected(node="n0", wall=NOW, kind="validator", check="gemm", drained=True))
    journal.add(Started(node="n0", wall=NOW + 1, task="t9", trigger="return"))
    journal.add(ended("n0", 500.0, NOW + 2, gemm=HOSTILE))
    journal.add(Returned(node="n0", wall=NOW + 3))


def test_pages_of_a_fleet_and_of_a_node(server: Server, visitor: MakeVisitor) -> None:
    seed(server)
    reader = visitor("ada", "read")
    answer = reader.get("/dashboard/validations")
    assert answer.status == 200
    tags = check_markup(answer.text)
    words = re.sub(r"\s+", " ", tags.text)
    assert "10 of 2 nodes are validated" in words
    assert "n0, disk write: worse, 500 MB/s" in words
    assert answer.text.count("<script") == 1
    assert [a["href"] for tag, a in tags.tags if tag == "a" and "aria-current" in a] == [
        "/dashboard/validations"
    ]
    for path in ("/dashboard/validations/n0", "/dashboard/validations/n0?figure=disk+write"):
        page = reader.get(path)
        assert page.status == 200
        words = re.sub(r"\s+", " ", check_markup(page.text).text)
        for line in ("drained: validator gemm", "validation started (return)",
                     "passed, and returned to service", "fleet, median now"):  # fmt: skip
            assert line in words, line
        assert "t9" not in words, "the task is another user's"
    assert "gemm</text>" in reader.get("/dashboard/validations/n0?figure=gemm").text
    unknown = reader.get("/dashboard/validations/n1")
    assert unknown.status == 200
    assert "no result yet" in Tags(unknown.text).text
    assert 'href="/dashboard/validations/n0"' in reader.get("/dashboard/nodes/n0").text


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/n9", 404, "no node 'n9' here"),
        ("/n0?figure=gem", 400, "invalid figure 'gem': expected one of disk write, gemm"),
        ("?part=77", 400, "invalid part 77"),
        ("?part=-1", 400, "part"),
        ("/n0?figure=a%00", 400, "control characters"),
    ],
)
def test_wrong_addresses(
    server: Server, visitor: MakeVisitor, path: str, status: int, message: str
) -> None:
    seed(server)
    answer = visitor().get(f"/dashboard/validations{path}")
    assert answer.status == status
    assert message in Tags(answer.text).text


def test_a_platform_that_has_validated_nothing(server: Server, visitor: MakeVisitor) -> None:
    text = Tags(visitor().get("/dashboard/validations").text).text
    assert "No node has been validated yet" in text
