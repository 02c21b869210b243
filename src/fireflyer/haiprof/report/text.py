"""A report for the terminal."""

from collections.abc import Iterator
from typing import Any

from fireflyer.haiprof.events import PHASES

BAR = 30
MARKS = dict(zip(PHASES, "FBODCKLW·", strict=True))
"""Letter of each phase in bars without colour; K is checkpoint, L callbacks, W framework."""


def bar(phases: dict[str, float], width: int = BAR) -> str:
    """Returns a step as a bar of letters, in the order of `PHASES`."""
    total = sum(phases.values())
    if not total:
        return ""
    text, at = "", 0.0
    for name in PHASES:
        at += phases.get(name, 0.0)
        text += MARKS[name] * (round(at / total * width) - len(text))
    return text


def duration(seconds: float | None) -> str:
    """Returns seconds in a readable unit."""
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def seen_phases(ranks: list[dict[str, Any]]) -> list[str]:
    """Returns the phases in which any rank spent time."""
    return [name for name in PHASES if any(rank["phases"].get(name) for rank in ranks)]


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a report: verdict, phases of each rank, findings, missing recorders."""
    yield report["verdict"]
    covered = report["covered"]
    if covered is not None:
        yield f"{report['steps']} steps; {covered:.1%} of their time accounted for"
        yield ""
        shown = seen_phases(report["ranks"])
        yield "  ".join([f"{'rank':>4}", f"{'step':>9}", *(f"{name:>13}" for name in shown)])
        for rank in report["ranks"]:
            cells = [duration(rank["phases"].get(name)) for name in shown]
            step = duration(rank["step_s"])
            yield "  ".join([f"{rank['rank']:>4}", f"{step:>9}", *(f"{c:>13}" for c in cells)])
    yield ""
    if not report["findings"]:
        yield "No finding: no rank, phase or recorder is out of the ordinary."
    for number, finding in enumerate(report["findings"], 1):
        won = f" (possible saving: {finding['share']:.0%} of a step)" if finding["share"] else ""
        yield f"{number}. {finding['sentence']}{won}"
        yield from (f"   - {item}" for item in finding["evidence"])
    for rank in report["ranks"][:1]:
        if rank["functions"]:
            yield ""
            yield f"Functions of rank {rank['rank']}, innermost, by samples:"
            for one in rank["functions"][:5]:
                yield f"  {one['share']:>6.1%}  {one['function']}"
        if rank["operators"]:
            yield ""
            yield f"Operators of rank {rank['rank']}, by time:"
            for one in rank["operators"][:5]:
                time = duration(one["seconds"])
                yield f"  {time:>9}  {one['calls']:>6} calls  {one['operator']}"
        for name, reason in rank["missing"].items():
            yield f"Not recorded: {name}: {reason}"


def changes(compared: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a comparison."""
    yield f"{'phase':<14}{'before':>11}{'after':>11}{'change':>9}"
    for one in compared:
        before, after = one["before_s"], one["after_s"]
        ratio = f"{after / before - 1:+.0%}" if before else "new" if after else "-"
        note = "" if one["clear"] else "  within the noise"
        yield f"{one['phase']:<14}{duration(before):>11}{duration(after):>11}{ratio:>9}{note}"
