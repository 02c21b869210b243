"""Charts of use over time: lines that need no colour, gaps, and whose they are."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from tests.hai.dashboard.conftest import Tags, Visitor
from tests.hai.dashboard.test_pages import check_markup
from tests.hai.server.conftest import Server
from tests.hai.server.http.test_access import Somebody
from tests.waiting import LIMIT_S

from fireflyer.hai.controller.series import select
from fireflyer.hai.dashboard.charts.use_charts import GRAPHS, draw
from fireflyer.hai.database.samples import Samples
from fireflyer.hai.database.store import Store
from fireflyer.hai.home import Home
from fireflyer.hai.model import SeriesView, TaskSpec
from fireflyer.hai.sampling.series import METRICS, Point, point

MINUTE = 60.0


def record(home: Path, points: dict[str, list[Point]]) -> None:
    """Writes a point a minute of each scope into a home's database; the last one is of this minute."""
    store = Store(Home(home).database)
    samples = Samples(store.database)
    for scope, found in points.items():
        for at, each in enumerate(found):
            samples.add(time.time() - MINUTE * (len(found) - 1 - at), {scope: each})
    store.close()


def test_lines_of_a_chart_differ_without_colour_and_break_at_gaps() -> None:
    view = SeriesView(
        scope="cluster", begin=0.0, step_s=600.0,
        metrics={"held": [1.0, 2.0, None, 4.0], "capacity": [8.0] * 4, "loss": [None, 3.5, 3.25, None]},
    )  # fmt: skip
    occupancy, loss = draw(view, "GPU", 2400.0)
    assert occupancy.words == "held: last 4, mean 2.33, most 4; usable: last 8, mean 8, most 8"
    assert loss.words == "rank 0: last 3.25, mean 3.38, most 3.5"
    for chart, pieces in ((occupancy, [2, 1]), (loss, [1])):
        root = ElementTree.fromstring(chart.svg)
        lines = [each for each in root.iter("path") if " L" in each.attrib["d"]]
        assert [line.attrib["d"].count("M") for line in lines] == pieces
        dashes = [line.attrib.get("stroke-dasharray") for line in lines]
        assert len(set(dashes)) == len(dashes)
        texts = {text.text for text in root.iter("text")}
        assert {"minutes from now", "GPUs" if chart is occupancy else "loss"} <= texts
    assert draw(view, "GPU", 2400.0, ("Queue",)) == []
    assert [each.title for each in draw(view, "node", None)] == ["Occupancy", "Loss"]


def test_a_chart_exists_for_each_metric_that_is_recorded() -> None:
    drawn = [metric for graph in GRAPHS for metric, _ in graph.metrics]
    assert sorted(drawn) == sorted(METRICS)


def test_old_times_come_from_the_level_that_still_has_them(tmp_path: Path) -> None:
    store = Store(tmp_path / "hai.sqlite")
    samples = Samples(store.database)
    noon = 1_800_000_000.0
    for hour in (0, 1, 24 * 70):  # by the last one, minutes and tens of minutes are dropped
        for minute in range(60):
            samples.add(noon + hour * 3600 + minute * MINUTE, {"task:t1": point(cpu=3.0)})
    view = select(samples, "task:t1", 3600.0, noon + 3600.0)
    assert view.step_s == 3600
    assert 3.0 in view.metrics["cpu"]
    store.close()


def test_pages_show_the_charts_of_what_the_reader_may_see(
    server: Server, visitor: Callable[..., Visitor], spec: Callable[..., TaskSpec], tmp_path: Path
) -> None:
    owner, ada, bob = visitor(), visitor("ada"), visitor("bob")
    assert "No samples in this time" in owner.get("/dashboard/use").text
    client = Somebody(server, tmp_path, "ada", "submit").client
    client.submit(spec("hold"))
    client.wait("t1", {"running"}, LIMIT_S)
    record(
        server.home,
        {
            "cluster": [point(held=1, capacity=2, queued=3, running=1)] * 5,
            "node:n0": [point(held=1, capacity=1, cpu=1.5)] * 5,
            "user:ada": [point(held=1, useful=0.5)] * 5,
            "task:t1": [point(step=10 * at, loss=4 - at / 2, speed=0.2) for at in range(5)],
        },
    )
    shown = {
        "/dashboard": ["Occupancy", "Queue"],
        "/dashboard/use": ["Occupancy", "Queue"],
        "/dashboard/use?scope=user:ada&window=6h": ["Occupancy", "Goodput"],
        "/dashboard/use?scope=node:n0&window=1y": ["Occupancy", "CPU"],
        "/dashboard/nodes/n0": ["Occupancy", "CPU"],
        "/dashboard/tasks/t1": ["Step", "Loss", "Speed"],
    }
    for path, titles in shown.items():
        page = ada.get(path).text
        found = re.findall(r'<text class="title"[^>]*>([^<]+)<', page)
        # The server samples at each full minute, too, which may add charts.
        assert [title for title in found if title in titles] == titles, path
        check_markup(page)
    words = Tags(ada.get("/dashboard/tasks/t1").text).text
    assert "rank 0: last 2, mean" in words
    for scope, status in (("user:ada", 400), ("task:t1", 404), ("moon", 400), ("cluster", 200)):
        assert bob.get(f"/dashboard/use?scope={scope}").status == status, scope
    assert owner.get("/dashboard/use?window=2h").status == 400
