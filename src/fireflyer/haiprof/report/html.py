"""Report as a single HTML file that loads nothing."""

from collections.abc import Sequence
from typing import Any

from fireflyer import charts
from fireflyer.charts import Markup, svg
from fireflyer.haiprof.events import PHASES
from fireflyer.haiprof.records import RankProfile
from fireflyer.haiprof.report.text import duration, seen_phases

COLOURS = {
    "forward": "#4477aa", "backward": "#66ccee", "optimizer": "#228833", "data": "#ccbb44",
    "communication": "#ee6677", "checkpoint": "#aa3377", "callbacks": "#332288",
    "framework": "#777777", "other": "#cccccc",
}  # fmt: skip
"""Colours of the phases that readers with colour-blindness can tell apart."""

WIDTH, HEIGHT, LABEL, MOST_BARS = 720, 110, 18, 240
"""Sizes of a drawing in SVG units: width, height of the bars over time, height of a line of text.
Then the maximum number of bars."""


def page(report: dict[str, Any], profiles: Sequence[RankProfile]) -> str:
    """Returns the page."""
    ranks = report["ranks"]
    names = seen_phases(ranks)
    bars = {
        f"Rank {rank['rank']}: {duration(rank['step_s'])} a step": rank["phases"]
        for rank in ranks
        if rank["step_s"]
    }
    rows = [
        (rank["rank"], duration(rank["step_s"]), *(duration(rank["phases"].get(n)) for n in names))
        for rank in ranks
    ]
    functions = [
        [(one["function"], f"{one['share']:.1%}") for one in rank["functions"]] for rank in ranks
    ]
    return charts.render(
        "report.html", "fireflyer.haiprof.report", title="haiprof", report=report, colours=COLOURS,
        bars=charts.stacked_bars("A step of each rank", bars, COLOURS, duration),
        heads=("rank", "step", *names), rows=rows, functions=functions,
        steps=[_steps(profile) for profile in profiles if profile.steps],
    )  # fmt: skip


def _steps(profile: RankProfile) -> Markup:
    """Draws each step as a bar over time; the phases of a step are stacked in the bar."""
    rows = profile.steps[:: -(-len(profile.steps) // MOST_BARS)]
    longest = max(row.seconds for row in rows)
    width = WIDTH / len(rows)
    label = f"Rank {profile.header.rank}: {len(profile.steps)} steps, longest {duration(longest)}"
    parts = [svg.text(label, 0, 12)]
    for number, row in enumerate(rows):
        top = float(HEIGHT + LABEL)
        for name in PHASES:
            size = row.phases.get(name, 0.0) / longest * HEIGHT
            top -= size
            if size > 0:
                tip = f"{name} {duration(row.phases[name])}"
                parts.append(svg.rect(number * width, top, width, size, tip, fill=COLOURS[name]))
    return svg.drawing(label, WIDTH, HEIGHT + LABEL, parts)
