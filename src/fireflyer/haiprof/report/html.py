"""A report as one HTML file without links to anything outside of it."""

from collections.abc import Sequence
from html import escape
from typing import Any

from fireflyer import charts
from fireflyer.haiprof.events import PHASES
from fireflyer.haiprof.records import RankProfile
from fireflyer.haiprof.report.text import duration, seen_phases

COLOURS = {
    "forward": "#4477aa", "backward": "#66ccee", "optimizer": "#228833", "data": "#ccbb44",
    "communication": "#ee6677", "checkpoint": "#aa3377", "callbacks": "#332288",
    "framework": "#777777", "other": "#cccccc",
}  # fmt: skip
"""A palette that people with colour-blindness can tell apart."""

WIDTH, HEIGHT, LABEL, MOST_BARS, KEY = 720, 110, 18, 240, 26
"""Sizes of a drawing: width, height of bars over time, height of a line of text, most steps, width of a
colour in the key with its margins."""


def page(report: dict[str, Any], profiles: Sequence[RankProfile]) -> str:
    """Returns the page."""
    lead = [report["verdict"]]
    if report["covered"] is not None:
        lead.append(
            f"{report['steps']} steps; {report['covered']:.1%} of their time accounted for."
        )
    ranks = report["ranks"]
    bars = [_key(), *(_bar(rank) for rank in ranks), _table(ranks)]
    steps = [_steps(profile) for profile in profiles if profile.steps]
    return charts.page(
        "haiprof",
        [
            charts.Section("Verdict", lead),
            _findings(report["findings"]),
            charts.Section("A step of each rank", parts=bars),
            charts.Section("Steps over time", parts=[_key(), *steps]),
            charts.Section("Functions and recorders", parts=[_details(rank) for rank in ranks]),
        ],
    )


def _findings(findings: list[dict[str, Any]]) -> charts.Section:
    title = "Findings, by time to be won"
    if not findings:
        return charts.Section(title, ["None: no rank, phase or recorder is out of the ordinary."])
    items = [
        f"<li>{escape(one['sentence'])}<ul>"
        + "".join(f"<li>{escape(text)}</li>" for text in one["evidence"])
        + "</ul></li>"
        for one in findings
    ]
    return charts.Section(title, parts=[f"<ol>{''.join(items)}</ol>"])


def _drawing(label: str, height: float, body: str) -> str:
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {height + LABEL}" role="img">'
    text = escape(label)
    return f'{head}<title>{text}</title><text x="0" y="12">{text}</text>{body}</svg>'


def _key() -> str:
    letters = sum(len(name) for name in PHASES)
    body, x = "", 0.0
    for name in PHASES:
        body += (
            f'<rect x="{x:.0f}" y="2" width="12" height="12" fill="{COLOURS[name]}"/>'
            f'<text x="{x + 16:.0f}" y="12">{name}</text>'
        )
        x += KEY + (WIDTH - KEY * len(PHASES)) * len(name) / letters
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {LABEL}" aria-hidden="true">{body}</svg>'


def _rect(name: str, seconds: float, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'fill="{COLOURS[name]}"><title>{name} {duration(seconds)}</title></rect>'
    )


def _bar(rank: dict[str, Any]) -> str:
    """Returns the mean step of a rank, its phases side by side."""
    if not rank["step_s"]:
        return f"<p>Rank {rank['rank']}: no step.</p>"
    body, at = "", 0.0
    for name in PHASES:
        seconds = rank["phases"].get(name, 0.0)
        size = seconds / rank["step_s"] * WIDTH
        if size > 0:
            body += _rect(name, seconds, at, LABEL, size, 22)
        at += size
    return _drawing(f"Rank {rank['rank']}: {duration(rank['step_s'])} a step", 22, body)


def _steps(profile: RankProfile) -> str:
    """Returns steps over time, the phases of each on top of each other."""
    rows = profile.steps[:: -(-len(profile.steps) // MOST_BARS)]
    longest = max(row.seconds for row in rows)
    width = WIDTH / len(rows)
    body = ""
    for number, row in enumerate(rows):
        top = float(HEIGHT + LABEL)
        for name in PHASES:
            size = row.phases.get(name, 0.0) / longest * HEIGHT
            top -= size
            if size > 0:
                body += _rect(name, row.phases[name], number * width, top, width, size)
    count = len(profile.steps)
    label = f"Rank {profile.header.rank}: {count} steps, longest {duration(longest)}"
    return _drawing(label, HEIGHT, body)


def _table(ranks: list[dict[str, Any]]) -> str:
    shown = seen_phases(ranks)
    rows = [
        (rank["rank"], duration(rank["step_s"]), *(duration(rank["phases"].get(n)) for n in shown))
        for rank in ranks
    ]
    return charts.table(("rank", "step", *shown), rows)


def _details(rank: dict[str, Any]) -> str:
    parts = [f"<details><summary>Rank {rank['rank']}: {escape(rank['command'])}</summary>"]
    functions = [(one["function"], f"{one['share']:.1%}") for one in rank["functions"]]
    if functions:
        parts.append(charts.table(("function, innermost", "samples"), functions))
    for name, values in rank["recorders"].items():
        parts.append(charts.table((name, "value"), list(values.items())))
    for name, reason in rank["missing"].items():
        parts.append(f"<p>Not recorded: {escape(name)}: {escape(reason)}</p>")
    return "\n".join([*parts, "</details>"])
