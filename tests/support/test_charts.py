"""Axes, charts and pages."""

import subprocess
import sys
from xml.etree import ElementTree

import pytest

from fireflyer.charts import (
    Axis,
    Box,
    Note,
    Section,
    Series,
    bar_chart,
    heat_map,
    key,
    line_chart,
    page,
    stacked_bars,
    svg,
    table,
    timeline,
)  # fmt: skip
from fireflyer.charts.axes import decades, legend_places, ticks


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (2.0, 7.0, 6, [2, 3, 4, 5, 6, 7]),
        (0.0, 136.0, 10, [0, 20, 40, 60, 80, 100, 120]),
        (0.0, 0.1, 2, [0, 0.05, 0.1]),
        (3.0, 3.0, 5, [3]),
    ],
)
def test_ticks_are_round(low: float, high: float, about: int, expected: list[float]) -> None:
    assert ticks(low, high, about) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.0, 1000.0, [1, 10, 100, 1000]), (3.0, 30.0, [5, 10, 20]), (6.0, 7.0, [6, 7])],
)
def test_marks_of_a_logarithmic_axis(low: float, high: float, expected: list[float]) -> None:
    assert decades(low, high) == pytest.approx(expected)


def test_a_chart_leaves_out_points_that_its_axes_cannot_show() -> None:
    series = [Series("a<b", [(0.0, 1.0), (1.0, float("nan")), (10.0, 2.0)], marks=True)]
    text = line_chart("t", Axis("x", log=True), Axis("y"), series)
    assert text.count("<circle") == 2  # one point, and the legend
    assert "a&lt;b" in text
    ElementTree.fromstring(text)
    with pytest.raises(ValueError, match="no point to show"):
        line_chart("t", Axis("x", log=True), Axis("y"), [Series("a", [(0.0, 1.0)])])


def test_a_heat_map_averages_what_is_too_much_to_show() -> None:
    names = [str(n) for n in range(160)]
    text = heat_map("t", names, ["c"], [[float(n % 2)] for n in range(160)], " %")
    assert text.count("<rect") == 80
    assert "0..1, c: 0.5 %" in text
    assert heat_map("t", ["a"], ["b"], [[None]]).count("<rect") == 0
    with pytest.raises(ValueError, match="expected 1 x 1 values"):
        heat_map("t", ["a"], ["b"], [])


def test_cells_with_marks_are_seen_without_colour() -> None:
    text = heat_map(
        "t", ["r"], ["a", "b", "c"], [[1.0, None, None]], marks=[["!", "<", ""]],
        tips=[["<tip>", "other", ""]], links=["/a?x=1&y=2", "/b", "/c"],
    )  # fmt: skip
    ElementTree.fromstring(text)
    assert text.count("<rect") == text.count("<a ") == 2
    assert 'href="/a?x=1&amp;y=2"' in text
    assert "&lt;tip&gt;" in text
    with pytest.raises(ValueError, match="more than 80 rows"):
        heat_map("t", ["r"] * 81, ["c"], [[1.0]] * 81, marks=[[""]] * 81)


def test_text_of_a_page_is_escaped_and_parts_are_not() -> None:
    drawn = svg.element("svg", "<x>", title='"<y>"')
    assert drawn == '<svg title="&quot;&lt;y&gt;&quot;">&lt;x&gt;</svg>'
    text = page("<t>", [Section("<h>", ["<p>"], [drawn, "<z>"])], ["<l>"])
    assert drawn in text
    for plain in ("<t>", "<h>", "<p>", "<z>", "<l>"):
        assert plain not in text.replace("<p>&lt;", "")
        assert plain.replace("<", "&lt;").replace(">", "&gt;") in text


def test_cells_of_a_table_are_texts_numbers_and_notes() -> None:
    text = table(["<x>", "y"], [["<y>", 1234567], [None, Note(0.25, "<2")]])
    assert "&lt;x&gt;" in text
    assert "<td>&lt;y&gt;</td><td>1,234,567</td>" in text
    assert "<td></td><td>0.25<small>&lt;2</small></td>" in text
    assert "&lt;k&gt;" in key({"<k>": "red"})


def test_numbers_of_a_drawing_have_at_most_two_decimals() -> None:
    line = svg.line(1.0, 2 / 3, 100, 1e4)
    assert line == '<line class="grid" x1="1" x2="100" y1="0.67" y2="10000"/>'
    assert svg.element("a", stroke_dasharray=None, class_="b") == '<a class="b"/>'


def test_a_full_row_of_a_legend_continues_on_the_next() -> None:
    assert [y for _, y in legend_places(["a" * 20] * 3, 480)] == [22, 22, 40]


def test_bars_stand_side_by_side_and_stacks_fill_their_row() -> None:
    up = Axis("s", log=True)
    text = bar_chart("t", ["a", "b<"], {"x": [1.0, None], "y": [10.0, 100.0]}, "size", up)
    ElementTree.fromstring(text)
    assert text.count("<rect") == 2 + 3, "the legend, and a bar for each value"
    assert "y, b&lt;: 100" in text
    stack = ElementTree.fromstring(
        stacked_bars("t", {"r": {"a": 1, "b": 3}}, {"a": "red", "b": "blue"})
    )
    assert [rect.get("width") for rect in stack.iter("rect")] == ["180", "540"]


def test_jinja2_is_imported_with_the_first_page_only() -> None:
    code = (
        "import sys, fireflyer.charts, fireflyer.demo.report, fireflyer.haiprof.report.html\n"
        "import fireflyer.ffrecord.convert.preview, fireflyer.hai.simulation.page\n"
        "assert 'jinja2' not in sys.modules; fireflyer.charts.page('t', [])\n"
        "assert 'jinja2' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_timeline_marks_kinds_by_letters_and_patterns() -> None:
    boxes = [Box(0, 0.0, 1.0, "F", "F0", "a<b"), Box(1, 1.0, 3.0, "B", "B0", "back")]
    text = timeline("t", {"planned": boxes}, ["rank 0", "rank 1"], {"F": "forward", "B": "back"})
    ElementTree.fromstring(text)
    assert "a&lt;b: 0.0 to 1000.0 ms" in text
    assert text.count("<pattern") == 1, "the first kind has none"
    assert text.count("url(#") == 2, "the box and the legend"
    assert ">B0</text>" in text
    with pytest.raises(ValueError, match="no box to show"):
        timeline("t", {"planned": []}, [], {})
