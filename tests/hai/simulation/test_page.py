"""The page: well-formed, self-contained, and with every policy on every plot."""

import re
from xml.etree import ElementTree

import msgspec
import pytest

from fireflyer.hai.simulation.generate import generate
from fireflyer.hai.simulation.ledger import CAUSES
from fireflyer.hai.simulation.measures import curves, measure
from fireflyer.hai.simulation.page import ROWS, Done, cell, number_text, page
from fireflyer.hai.simulation.replay import Setup, replay
from fireflyer.hai.simulation.trace import with_users


def done_by(policy: str) -> Done:
    trace = generate("philly", 200, capacity=64, users=6, seed=2)
    trace = with_users(msgspec.structs.replace(trace, source="<b>&evil"), None)
    done = replay(trace, Setup(nodes=8, policy=policy))
    return measure(done), curves(done)


@pytest.fixture(scope="module")
def both() -> list[Done]:
    return [done_by("fifo"), done_by("timeshare")]


@pytest.fixture(scope="module")
def text(both: list[Done]) -> str:
    return page(both)


def test_it_is_one_file_without_scripts(text: str) -> None:
    assert "<script" not in text
    assert re.findall(r"(?:src|href)=", text) == []
    assert "http" not in text.replace("http-equiv", "")
    assert "Content-Security-Policy" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_its_plots_are_well_formed_and_show_every_policy(text: str) -> None:
    plots = re.findall(r"(?s)<svg.*?</svg>", text)
    assert len(plots) == 5
    for plot in plots:
        tree = ElementTree.fromstring(plot)
        words = [node.text or "" for node in tree.iter("text")]
        assert "fifo" in words
        assert "timeshare" in words
        assert "nan" not in plot.lower()


def test_every_cause_has_a_colour_in_light_and_dark(text: str) -> None:
    for number in range(len(CAUSES)):
        assert text.count(f"--c{number}: #") == 2
        assert f"background: var(--c{number})" in text


def test_names_are_text(text: str) -> None:
    assert "<b>&evil" not in text
    assert "&lt;b&gt;&amp;evil" in text


def test_the_table_has_every_row(text: str) -> None:
    for _, name, _ in ROWS:
        assert f"<td>{name}</td>" in text


def test_figures_can_be_read_and_compared(both: list[Done], text: str) -> None:
    assert [cell(value, "h") for value in (0.0, 2e-4, 0.25, 1.0, 36.94)] == [
        "0 h", "0.72 s", "15 min", "1 h", "36.9 h",
    ]  # fmt: skip
    assert (cell(1234, ""), cell(0.5853, "%")) == ("1,234", "58.53%")
    row = re.search(r"<tr><td>JCT, mean</td>.*?</tr>", text)
    assert row is not None
    first, second = (result.jct_mean_h for result, _ in both)
    assert row[0].count("<small>") == 1
    assert f"<small>{number_text(round(second / first, 3))}×</small>" in row[0]


def test_one_policy_and_no_wait_make_a_page_too() -> None:
    trace = with_users(generate("philly", 1, capacity=64, seed=2), None)
    done = replay(trace, Setup(nodes=8, policy="fifo"))
    assert page([(measure(done), curves(done))]).endswith("</html>\n")


def test_numbers_are_short() -> None:
    assert [number_text(v) for v in (0.0, 0.01234, 3.456, 1240.4, 1e-7)] == [
        "0", "0.0123", "3.46", "1,240", "1.00e-07",
    ]  # fmt: skip
