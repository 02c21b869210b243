"""One HTML page on replays: self-contained, without scripts, for phones and wide screens, light and
dark."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fireflyer.hai.simulation import plots
from fireflyer.hai.simulation.ledger import CAUSES
from fireflyer.hai.simulation.measures import SIZES, Curves, Result
from fireflyer.hai.simulation.plots import Axis
from fireflyer.hai.simulation.style import STYLE

Done = tuple[Result, Curves]

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
    ("cross_zone_over_1", "jobs over two zones more than once", ""),
)  # fmt: skip
"""Field, name and unit of the comparison, here and in the terminal's table."""


def page(done: Sequence[Done]) -> str:
    """Returns the page on one or several policies (at most six) on one trace."""
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
        about.append(f"Records of the trace that are no jobs here: {words}.")
    if first.faults:
        words = ", ".join(f"{count:,} {kind}" for kind, count in first.faults.items())
        about.append(f"Faults under {first.policy}: {words}.")
    sections = [
        ("wide", "Policies", _table(done)),
        ("wide", "GPU-time by cause", _key(CAUSES, "c") + _goodput(done)),
        ("", "GPUs held over time", _key(names, "s") + _timeline(done)),
        ("", "Wait until the first start", _key(names, "s") + _waits(done)),
        ("", "Time in the system by size, mean", _key(names, "s") + _sizes(done)),
        ("", "GPUs waited for over time", _key(names, "s") + _backlog(done)),
    ]
    if first.by_user:
        sections.append(("wide", "Users with the most work", _users(done)))
    body = "".join(
        f'<section class="{kind}"><h2>{escape(title)}</h2>{content}</section>'
        for kind, title, content in sections
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(first.trace)}: {escape(', '.join(names))}</title><style>{STYLE}</style></head><body>"
        f"<h1>Replay: {escape(', '.join(names))}</h1>"
        + "".join(f"<p>{escape(line)}</p>" for line in about)
        + f"<main>{body}</main></body></html>\n"
    )


def _quota(quota: Mapping[str, Any]) -> str:
    """For example "Quota of user ada, priority high: at most 16 GPUs."."""
    whose = [f"{word} {quota[word]}" for word in ("user", "group", "priority") if quota[word]]
    most = [
        f"{quota[key]:,} {name}"
        for key, name in (("gpus", "GPUs"), ("nodes", "nodes"))
        if quota[key] is not None
    ]
    return f"Quota of {', '.join(whose) or 'each user'}: at most {' and '.join(most)}."


def _window(window: Mapping[str, Any]) -> str:
    """For example "Window: 8 of the nodes from 36 h until 40 h, for user ada."."""
    begin, end = (plots.number_text(window[key] / 3600) for key in ("begin", "end"))
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
    text = f"{value:,}" if isinstance(value, int) else plots.number_text(value)
    return f"{text} {unit}".rstrip()


def _table(done: Sequence[Done]) -> str:
    heads = "".join(f"<th>{escape(result.policy)}</th>" for result, _ in done)
    words = f"<p>Small figures: as a multiple of {escape(done[0][0].policy)}'s.</p>"
    about = words if len(done) > 1 else ""
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(
            f"<td>{cell(getattr(result, field), unit)}{_against(done[0][0], result, field)}</td>"
            for result, _ in done
        )
        + "</tr>"
        for field, name, unit in ROWS
    )
    return f"{about}<table><tr><th></th>{heads}</tr>{rows}</table>"


def _against(first: Result, result: Result, field: str) -> str:
    """Formats a figure as a multiple of the first policy's; empty for the first policy itself, and
    if a figure is 0."""
    base, value = getattr(first, field), getattr(result, field)
    if result is first or not base or not value:
        return ""
    ratio = value / base
    text = "&lt; 0.001" if ratio < 0.001 else plots.number_text(round(ratio, 3))
    return f"<small>{text}&times;</small>"


def _users(done: Sequence[Done]) -> str:
    heads = "".join(
        f"<th>wait, {escape(r.policy)}</th><th>JCT, {escape(r.policy)}</th>" for r, _ in done
    )
    by_name = [{each.name: each for each in result.by_user} for result, _ in done]
    rows = []
    for user in done[0][0].by_user[:20]:
        cells = "".join(
            f"<td>{cell(found[user.name].wait_mean_h, 'h')}</td>"
            f"<td>{cell(found[user.name].jct_mean_h, 'h')}</td>"
            for found in by_name
        )
        rows.append(
            f"<tr><td>{escape(user.name)}</td><td>{user.jobs:,}</td><td>{user.gpu_h:,.0f}</td>{cells}</tr>"
        )
    return f"<table><tr><th>user</th><th>jobs</th><th>GPU-h</th>{heads}</tr>{''.join(rows)}</table>"


def _key(names: Sequence[str], kind: str) -> str:
    marks = "".join(
        f'<span><i class="{kind}{n}"></i>{escape(name)}</span>' for n, name in enumerate(names)
    )
    return f'<div class="key">{marks}</div>'


def _goodput(done: Sequence[Done]) -> str:
    rows = {}
    for result, _ in done:
        whole = max(result.capacity_gpu_ms, 1)
        rows[result.policy] = {cause: result.split_gpu_ms[cause] / whole for cause in CAUSES}
    return plots.stacks("GPU-time by cause", rows)


def _over_time(done: Sequence[Done], name: str, series: str, axis: Axis) -> str:
    longest = max(curves.time_h[-1] for _, curves in done) / 24
    return plots.lines(
        name,
        {
            result.policy: (
                [(a + b) / 48 for a, b in zip(curves.time_h, curves.time_h[1:], strict=False)],
                getattr(curves, series),
            )
            for result, curves in done
        },
        Axis(0.0, longest), axis, ("days", "share of all GPUs"),
    )  # fmt: skip


def _timeline(done: Sequence[Done]) -> str:
    return _over_time(done, "GPUs held over time", "held", Axis(0.0, 1.0))


def _backlog(done: Sequence[Done]) -> str:
    most = max(max(curves.queued) for _, curves in done)
    return _over_time(done, "GPUs waited for over time", "queued", Axis(0.0, max(most, 0.1)))


def _waits(done: Sequence[Done]) -> str:
    """Plots seconds on a logarithmic axis; at its left edge are the jobs that waited less than a
    second."""
    longest = max(curves.wait_s[-1] for _, curves in done)
    series = {}
    for result, curves in done:
        xs = [max(wait, 1.0) for wait in curves.wait_s]
        series[result.policy] = ([*xs, max(longest, 10.0)], [*curves.wait_share, 1.0])
    labels = ("seconds waited at most", "share of jobs")
    return plots.lines(
        "Wait", series, Axis(1.0, max(longest, 10.0), log=True), Axis(0.0, 1.0), labels
    )


def _sizes(done: Sequence[Done]) -> str:
    present = {each.name for result, _ in done for each in result.by_size}
    groups = [name for _, name in SIZES if name in present]
    series: dict[str, list[float | None]] = {}
    for result, _ in done:
        found = {each.name: max(each.jct_mean_h, 1e-3) for each in result.by_size}
        series[result.policy] = [found.get(name) for name in groups]
    values = [value for row in series.values() for value in row if value is not None]
    axis = Axis(min(values) / 2, max(values) * 1.5, log=True)
    return plots.bars("JCT by size", groups, series, axis, "hours (log)", "h")
