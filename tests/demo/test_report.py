"""The report page: whole, well-formed, self-contained, and never the author of its own markup."""

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.demo.conftest import META

from fireflyer.demo import chart, report
from fireflyer.demo.driver import Options
from fireflyer.demo.figures import Figures, compute
from fireflyer.errors import ConfigError, StorageError

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks nesting; collects tags, classes and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def rendered(script: Any, sample: str = "def f(): pass", options: Options | None = None) -> str:
    figures = compute(script.story, orphans=0)
    assert figures is not None
    options = options or Options()
    return report.render(figures, script.story, META, sample, options, {"Processor": "<i>x</i>"})


def test_is_well_formed_and_holds_every_figure(finished: Any) -> None:
    page = parsed(rendered(finished))
    figures = compute(finished.story, orphans=0)
    assert figures is not None
    for name, value, meaning in report.table(figures):
        assert name in page.text
        assert value in page.text
        assert meaning in page.text
    assert "rank 1 killed" in page.text
    assert "suspended, then resumed" in page.text


def test_needs_nothing_from_elsewhere_and_runs_nothing(finished: Any) -> None:
    text = rendered(finished)
    page = parsed(text)
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not [
        name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")
    ]
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_text_from_outside_is_escaped(finished: Any) -> None:
    evil = "</pre><script>alert(1)</script>&amp;"
    options = Options(text=Path("/texts/<b>"))
    page = parsed(rendered(finished, sample=evil, options=options))
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert "i" not in page.tags
    assert evil in page.text


def test_a_run_that_was_cut_short_has_a_page_too(script: Any) -> None:
    script.start()
    script.train()
    page = parsed(rendered(script, sample=""))
    assert "not seen" in page.text
    assert "The run ended before the model could write." in page.text


def test_every_mark_of_the_chart_lies_inside_it(finished: Any) -> None:
    figures = compute(finished.story, orphans=0)
    assert figures is not None
    svg = chart.draw(finished.story, figures)
    xs = [float(v) for v in re.findall(r'\b(?:x|x1|x2|cx)="(-?[\d.]+)"', svg)]
    ys = [float(v) for v in re.findall(r'\b(?:y|y1|y2|cy)="(-?[\d.]+)"', svg)]
    for pairs in re.findall(r'points="([^"]+)"', svg):
        for pair in pairs.split():
            x, y = pair.split(",")
            xs.append(float(x))
            ys.append(float(y))
    assert min(xs) >= 0
    assert max(xs) <= chart.WIDTH
    assert min(ys) >= 0
    assert max(ys) <= 600
    assert svg.count('class="mark kill"') == 1
    assert svg.count('class="mark suspend"') == 1
    assert svg.count('class="mark back"') == 2
    assert svg.count('class="save"') == 3
    assert svg.count('class="curve loss"') == 3


def test_long_curves_are_thinned_to_their_means() -> None:
    points = [(float(i), float(i % 2)) for i in range(4001)]
    thinned = chart.thin(points, most=400)
    assert len(thinned) <= 401
    assert thinned[0] == pytest.approx((5.0, 5 / 11))
    assert chart.thin(points[:10]) == points[:10]


def test_a_smoothed_constant_is_that_constant() -> None:
    assert chart.smooth([2.0] * 50) == pytest.approx([2.0] * 50)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "not seen"), (0.0213, "21 ms"), (1.234, "1.23 s")]
)
def test_seconds_are_told_in_a_fitting_unit(value: float | None, expected: str) -> None:
    assert report.seconds(value) == expected


def test_saving_replaces_the_page_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")
    report.save("new ✓", path)
    assert path.read_text(encoding="utf-8") == "new ✓"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_saving_goes_through_a_link_and_refuses_a_fifo(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "r.html").symlink_to("kept/page")
    for page in ("new", "newer"):
        report.save(page, tmp_path / "r.html")
        assert (tmp_path / "kept" / "page").read_text() == page
    assert (tmp_path / "r.html").is_symlink()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo is a pipe or a device"):
        report.save("new", tmp_path / "fifo")
    assert (tmp_path / "fifo").is_fifo()


def test_saving_where_it_cannot_be_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "r.html").mkdir()
    with pytest.raises(StorageError, match=r"r\.html"):
        report.save("new", tmp_path / "r.html")
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_the_keys_that_scripts_rely_on_are_there() -> None:
    fields = set(Figures.__struct_fields__)
    assert {
        "steps", "tokens_per_s", "loss_start", "loss_at_kill", "loss_end", "kill_detected_s", "restart_s",
        "suspend_s", "checkpoint_stall_ms", "steps_lost", "orphans",
    } <= fields  # fmt: skip
