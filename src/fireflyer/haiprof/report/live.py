"""Live view of a collection: ranks as rows, phases as bars."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fireflyer.haiprof.attach.collect import Attached
from fireflyer.haiprof.events import PHASES
from fireflyer.haiprof.explain.measures import growth
from fireflyer.haiprof.records import summary
from fireflyer.haiprof.report.html import COLOURS
from fireflyer.haiprof.report.text import duration

if TYPE_CHECKING:
    from rich.table import Table

WINDOW = 20
"""Number of steps over which phases are averaged."""


def table(attached: Sequence[Attached], width: int = 40) -> "Table":
    """Returns the current state as a table."""
    from rich.table import Table
    from rich.text import Text

    key = Text()
    for name in PHASES:
        key.append("█ ", style=COLOURS[name]).append(f"{name}  ")
    shown = Table(box=None, caption=key, caption_justify="left", expand=False)
    for title in ("RANK", "STEPS", "STEP"):
        shown.add_column(title, justify="right")
    shown.add_column("PHASES", min_width=width)
    for title in ("CPU", "MEMORY"):
        shown.add_column(title, justify="right")
    for one in sorted(attached, key=lambda each: each.profile.header.rank):
        found = summary(one.profile.steps[-WINDOW:])
        phases = found["phases"]
        bar = Text()
        if isinstance(phases, dict) and sum(phases.values()):
            at, drawn, total = 0.0, 0, sum(phases.values())
            for name in PHASES:
                at += phases.get(name, 0.0)
                cells = round(at / total * width) - drawn
                bar.append("█" * cells, style=COLOURS[name])
                drawn += cells
        else:
            bar.append(one.session.failure or "no step yet")
        basic = one.profile.samples.get("basic", [])[-4:]
        memory = basic[-1].values["rss_bytes"] / 1e6 if basic else 0.0
        step = found["step_s"]
        shown.add_row(
            str(one.profile.header.rank),
            str(len(one.profile.steps)),
            duration(step if isinstance(step, float) else None),
            bar,
            f"{growth(basic, 'cpu_s_total'):.0%}",
            f"{memory:.0f} MB",
        )
    return shown
