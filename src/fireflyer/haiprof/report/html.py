"""A report as one HTML file without links to anything outside of it."""

from collections.abc import Sequence
from html import escape
from typing import Any

from fireflyer.haiprof.events import PHASES
from fireflyer.haiprof.records import RankProfile
from fireflyer.haiprof.report.text import duration

COLOURS = dict(
    zip(
        PHASES,
        ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb"),
        strict=True,
    )
)
"""A palette that people with colour-blindness can tell apart."""

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;text-align:right}
td:first-child,th:first-child{text-align:left}svg{width:100%;display:block}
.key i{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}
li{margin:.4em 0}code{overflow-wrap:anywhere}
"""

WIDTH, HEIGHT, MOST_BARS = 1000, 120, 250


def page(report: dict[str, Any], profiles: Sequence[RankProfile]) -> str:
    """Returns the page."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width,initial-scale=1'>",
        f"<title>haiprof</title><style>{_STYLE}</style><h1>haiprof</h1>",
        f"<p><b>{escape(report['verdict'])}</b></p>",
        _covered(report),
        _findings(report["findings"]),
        _key(),
        "<h2>A step of each rank</h2>",
        *(_bar(rank) for rank in report["ranks"]),
        "<h2>Steps over time</h2>",
        *(_steps(profile) for profile in profiles),
        _table(report["ranks"]),
        *(_details(rank) for rank in report["ranks"]),
        "</html>",
    ]
    return "\n".join(part for part in parts if part)


def _covered(report: dict[str, Any]) -> str:
    if report["covered"] is None:
        return ""
    return f"<p>{report['steps']} steps; {report['covered']:.1%} of their time accounted for.</p>"


def _findings(findings: list[dict[str, Any]]) -> str:
    if not findings:
        return "<p>No finding: no rank, phase or recorder is out of the ordinary.</p>"
    items = [
        f"<li>{escape(one['sentence'])}<ul>"
        + "".join(f"<li>{escape(text)}</li>" for text in one["evidence"])
        + "</ul></li>"
        for one in findings
    ]
    return f"<h2>Findings, by time to be won</h2><ol>{''.join(items)}</ol>"


def _key() -> str:
    return "<p class=key>" + "".join(
        f"<i style='background:{COLOURS[name]}'></i>{name}" for name in PHASES
    ) + "</p>"  # fmt: skip


def _stack(phases: dict[str, float], scale: float, x: float, width: float, up: bool) -> str:
    """Returns the phases of one step as rectangles, on top of each other or side by side."""
    out, at = [], 0.0
    for name in PHASES:
        size = phases.get(name, 0.0) * scale
        if size > 0:
            title = f"<title>{name} {duration(phases[name])}</title>"
            place = (
                f"x='{x:.1f}' y='{HEIGHT - at - size:.2f}' width='{width:.1f}' height='{size:.2f}'"
                if up
                else f"x='{at:.2f}' y='0' width='{size:.2f}' height='24'"
            )
            out.append(f"<rect {place} fill='{COLOURS[name]}'>{title}</rect>")
        at += size
    return "".join(out)


def _bar(rank: dict[str, Any]) -> str:
    if not rank["step_s"]:
        return f"<p>Rank {rank['rank']}: no step.</p>"
    body = _stack(rank["phases"], WIDTH / rank["step_s"], 0, 0, up=False)
    label = f"Rank {rank['rank']}, {duration(rank['step_s'])} a step"
    return (
        f"<p>{label}</p><svg viewBox='0 0 {WIDTH} 24' role=img aria-label='{label}' "
        f"preserveAspectRatio=none height=24>{body}</svg>"
    )


def _steps(profile: RankProfile) -> str:
    rows = profile.steps[:: max(1, len(profile.steps) // MOST_BARS)]
    if not rows:
        return ""
    longest = max(row.seconds for row in rows)
    width = WIDTH / len(rows)
    body = "".join(
        _stack(row.phases, HEIGHT / longest, n * width, width, up=True)
        for n, row in enumerate(rows)
    )
    label = f"Rank {profile.header.rank}, {len(profile.steps)} steps, longest {duration(longest)}"
    return (
        f"<p>{label}</p><svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img aria-label='{label}' "
        f"preserveAspectRatio=none height={HEIGHT}>{body}</svg>"
    )


def _table(ranks: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("rank", "step", *PHASES))
    rows = "".join(
        f"<tr><td>{rank['rank']}</td><td>{duration(rank['step_s'])}</td>"
        + "".join(f"<td>{duration(rank['phases'].get(name))}</td>" for name in PHASES)
        + "</tr>"
        for rank in ranks
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _details(rank: dict[str, Any]) -> str:
    parts = [f"<details><summary>Rank {rank['rank']}: {escape(rank['command'])}</summary>"]
    parts += [
        f"<div>{one['share']:.1%} <code>{escape(one['function'])}</code></div>"
        for one in rank["functions"]
    ]
    for name, values in rank["recorders"].items():
        cells = "".join(
            f"<tr><td>{escape(k)}</td><td>{v:,.4g}</td></tr>" for k, v in values.items()
        )
        parts.append(f"<h3>{escape(name)}</h3><table>{cells}</table>")
    for name, reason in rank["missing"].items():
        parts.append(f"<p>Not recorded: {escape(name)}: {escape(reason)}</p>")
    return "\n".join([*parts, "</details>"])
