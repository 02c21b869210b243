"""Report as a JSON document; the other views are made from this document."""

from collections.abc import Sequence
from typing import Any

import msgspec

from fireflyer.haiprof.explain import explain, verdict
from fireflyer.haiprof.explain.measures import RankMeasures, growth
from fireflyer.haiprof.records import RankProfile, summary


def document(profiles: Sequence[RankProfile]) -> dict[str, Any]:
    """Returns the whole report.

    `steps`, `covered` and `phases` (seconds a step) cover all ranks together. `ranks` has the same
    values for each rank, with the means of its recorders and the functions in which its training
    thread was sampled.
    """
    rows = [row for profile in profiles for row in profile.steps]
    whole = summary(rows)
    whole["steps"] = max((len(profile.steps) for profile in profiles), default=0)
    return {
        **whole,
        "verdict": verdict(profiles),
        "findings": [msgspec.to_builtins(finding) for finding in explain(profiles)],
        "ranks": [_rank(profile) for profile in profiles],
    }


def _rank(profile: RankProfile) -> dict[str, Any]:
    header = profile.header
    measures = RankMeasures(profile)
    return {
        "rank": header.rank,
        "pid": header.pid,
        "host": header.host,
        "command": header.command,
        **summary(profile.steps),
        "recorders": {name: _values(profile, name) for name in sorted(profile.samples)},
        "missing": header.missing,
        "functions": [{"function": name, "share": share} for name, share in measures.leaders(10)],
        "operators": _operators(profile),
        "collectives": len(profile.collectives),
    }


def _values(profile: RankProfile, recorder: str) -> dict[str, float]:
    """Returns the mean of each gauge and the rate per second of each counter, without the values by
    address (`blocked_`)."""
    samples = profile.samples[recorder]
    names = {name for sample in samples for name in sample.values if "blocked_" not in name}
    measures = RankMeasures(profile)
    return {
        name.replace("_total", "_rate"): (
            growth(samples, name) if name.endswith("_total") else measures.mean(recorder, name)
        )
        for name in sorted(names)
    }


def _operators(profile: RankProfile, most: int = 10) -> list[dict[str, Any]]:
    """Returns the operators with the most time; the time of an operator includes inner
    operators."""
    spent: dict[str, list[float]] = {}
    for operator in profile.operators:
        one = spent.setdefault(operator.name, [0.0, 0])
        one[0] += (operator.end_ns - operator.begin_ns) / 1e9
        one[1] += 1
    ordered = sorted(spent.items(), key=lambda item: -item[1][0])[:most]
    return [{"operator": n, "seconds": s, "calls": int(c)} for n, (s, c) in ordered]
