"""HTML page about replays: self-contained, without scripts, for phones and wide screens, in light
and dark colours."""

from collections.abc import Mapping, Sequence
from typing import Any

from fireflyer import charts
from fireflyer.charts import Axis, Markup, Note, Section, Series
from fireflyer.hai.simulation.ledger import CAUSES
from fireflyer.hai.simulation.measures import SIZES, Curves, Result

Done = tuple[Result, Curves]

SIZE = (440, 260)
"""Width and height of a chart in SVG units; two charts stand side by side."""

COLOURS = {cause: f"var(--c{number})" for number, cause in enumerate(CAUSES)}
"""Colour of each cause, as a variable of the style sheet."""

ROWS: tuple[tuple[str, str, str], ...] = (
    ("jct_mean_h", "JCT, mean", "h"), ("jct_p50_h", "JCT, median", "h"),
    ("jct_p95_h", "JCT, p95", "h"), ("jct_p99_h", "JCT, p99", "h"),
    ("wait_mean_h", "wait, mean", "h"), ("wait_p99_h", "wait, p99", "h"),
    ("wait_max_h", "wait, longest", "h"), ("makespan_h", "makespan", "h"),
    ("occupancy", "occupancy", "%"), ("utilisation", "utilisation", "%"),
    ("goodput", "goodput", "%"), ("preemptions", "preemptions", ""),
    ("preemptions_per_hour", "preemptions an hour", ""),
    ("most_preemptions", "most preemptions of a job", ""),
    ("fault_restarts", "restarts after faults", ""), ("lost_gpu_h", "work lost", "GPU-h"),
    ("rho_max", "finish-time fairness, max", ""), ("rho_p95", "finish-time fairness, p95", ""),
    ("rho_over_1", "jobs slower than on a fair share", "%"), ("jain", "Jain index of users", ""),
    ("cross_zone_over_1", "jobs with several cross-zone pairs", ""),
)  # fmt: skip
"""Rows of the comparison, in the page and in the terminal's table: field, name and unit."""


def page(done: Sequence[Done]) -> str:
    """Returns the page about one to six policies on one trace."""
    first = done[0][0]
    names = [result.policy for result, _ in done]
    cluster = f"{first.nodes} nodes of {first.gpus_per_node} GPUs"
    about = [
        f"{first.trace}: {first.jobs:,} jobs of {first.users:,} users on {cluster}, seed {first.seed}."
    ]
    if first.too_large:
        about.append(f"{first.too_large:,} jobs larger than the cluster are left out.")
    if first.over_quota:
        about.append(f"{first.over_quota:,} jobs larger than their quota are left out.")
    about += [_quota(quota) for quota in first.quotas]
    about += [_window(window) for window in first.windows]
    if first.left_out:
        words = ", ".join(f"{count:,} {why}" for why, count in sorted(first.left_out.items()))
        about.append(f"Records of the trace that do not count as jobs: {words}.")
    if first.faults:
        words = ", ".join(f"{count:,} {kind}" for kind, count in first.faults.items())
        about.append(f"Faults under {first.policy}: {words}.")
    sections = [
        _policies(done),
        Section("GPU-time by cause", parts=[charts.key(COLOURS), _goodput(done)]),
        *(Section("", parts=[chart], wide=False) for chart in (
            _over_time(done, "GPUs held over time", "held"), _waits(done), _sizes(done),
            _over_time(done, "GPUs waited for over time", "queued"),
        )),
    ]  # fmt: skip
    if first.by_user:
        sections.append(Section("Users with the most work", parts=[_users(done)]))
    return charts.page(f"Replay of {first.trace}: {', '.join(names)}", sections, about)


def _quota(quota: Mapping[str, Any]) -> str:
    """Describes a quota, for example "Quota of user ada, priority high: at most 16 GPUs."."""
    whose = [f"{word} {quota[word]}" for word in ("user", "group", "priority") if quota[word]]
    most = [
        f"{quota[key]:,} {name}"
        for key, name in (("gpus", "GPUs"), ("nodes", "nodes"))
        if quota[key] is not None
    ]
    return f"Quota of {', '.join(whose) or 'each user'}: at most {' and '.join(most)}."


def _window(window: Mapping[str, Any]) -> str:
    """Describes a window, for example "Window: 8 of the nodes from 36 h until 40 h, for user
    ada."."""
    begin, end = (number_text(window[key] / 3600) for key in ("begin", "end"))
    whose = [f"{word} {window[word]}" for word in ("user", "group") if window[word]]
    text = f"Window: {len(window['nodes'])} of the nodes from {begin} h until {end} h"
    return text + (f", for {', '.join(whose)}." if whose else ".")


def cell(value: float, unit: str) -> str:
    """Formats a figure of ROWS. Times below an hour are in minutes or seconds."""
    if unit == "%":
        return f"{value:.2%}"
    if unit == "h" and 0 < value < 1:
        minutes = value * 60
        return cell(minutes, "min") if minutes >= 1 else cell(round(minutes * 60, 3), "s")
    text = f"{value:,}" if isinstance(value, int) else number_text(value)
    return f"{text} {unit}".rstrip()


def number_text(value: float) -> str:
    """Formats a number with about three digits: 0.012, 3.4, 1,240."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.2e}" if "e" in text else text


def _policies(done: Sequence[Done]) -> Section:
    first = done[0][0]
    words = [f"Small figures: as a multiple of {first.policy}'s."] if len(done) > 1 else []
    rows = [
        (name, *(_compared(first, result, field, unit) for result, _ in done))
        for field, name, unit in ROWS
    ]
    heads = ["", *(result.policy for result, _ in done)]
    return Section("Policies", words, [charts.table(heads, rows)])


def _compared(first: Result, result: Result, field: str, unit: str) -> str | Note:
    """Formats a figure. If neither figure is 0, adds its ratio to the first policy's figure."""
    base, value = getattr(first, field), getattr(result, field)
    told = cell(value, unit)
    if result is first or not base or not value:
        return told
    ratio = value / base
    return Note(told, ("< 0.001" if ratio < 0.001 else number_text(round(ratio, 3))) + "×")


def _users(done: Sequence[Done]) -> Markup:
    heads = ["user", "jobs", "GPU-h"]
    for result, _ in done:
        heads += [f"wait, {result.policy}", f"JCT, {result.policy}"]
    by_name = [{each.name: each for each in result.by_user} for result, _ in done]
    rows = []
    for user in done[0][0].by_user[:20]:
        row = [user.name, f"{user.jobs:,}", f"{user.gpu_h:,.0f}"]
        for found in by_name:
            mine = found[user.name]
            row += [cell(mine.wait_mean_h, "h"), cell(mine.jct_mean_h, "h")]
        rows.append(row)
    return charts.table(heads, rows)


def _goodput(done: Sequence[Done]) -> Markup:
    rows = {}
    for result, _ in done:
        whole = max(result.capacity_gpu_ms, 1)
        rows[result.policy] = {cause: result.split_gpu_ms[cause] / whole for cause in CAUSES}
    return charts.stacked_bars("GPU-time by cause", rows, COLOURS)


def _over_time(done: Sequence[Done], title: str, curve: str) -> Markup:
    series = []
    for result, curves in done:
        days = [(a + b) / 48 for a, b in zip(curves.time_h, curves.time_h[1:], strict=False)]
        series.append(Series(result.policy, list(zip(days, getattr(curves, curve), strict=True))))
    return charts.line_chart(title, Axis("days"), Axis("share of all GPUs"), series, SIZE)


def _waits(done: Sequence[Done]) -> Markup:
    """Plots the waits on a logarithmic axis of seconds; jobs that waited less than a second are at
    the axis's left edge."""
    longest = max(10.0, *(curves.wait_s[-1] for _, curves in done))
    series = []
    for result, curves in done:
        xs = [max(wait, 1.0) for wait in curves.wait_s]
        points = zip([*xs, longest], [*curves.wait_share, 1.0], strict=True)
        series.append(Series(result.policy, list(points)))
    across = Axis("seconds waited at most", log=True)
    return charts.line_chart(
        "Wait until the first start", across, Axis("share of jobs"), series, SIZE
    )


def _sizes(done: Sequence[Done]) -> Markup:
    present = {each.name for result, _ in done for each in result.by_size}
    groups = [name for _, name in SIZES if name in present]
    series: dict[str, list[float | None]] = {}
    for result, _ in done:
        found = {each.name: max(each.jct_mean_h, 1e-3) for each in result.by_size}
        series[result.policy] = [found.get(name) for name in groups]
    return charts.bar_chart(
        "Mean time in the system by size",
        groups,
        series,
        "GPUs asked for",
        Axis("hours", log=True),
        SIZE,
    )
