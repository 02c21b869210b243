"""Conversion of the measurements of `bench train` to the rows of its report."""

from fireflyer.bench.harness import goals
from fireflyer.bench.harness.ranks import Timing
from fireflyer.bench.harness.report import Row
from fireflyer.bench.train.candidates import CANDIDATES, LOCAL
from fireflyer.bench.train.models import Payload
from fireflyer.bench.train.place import Measured

LEAST_EXPOSED_MS = 0.1  # smaller values count as this value: they are within the clock's noise


def lab_rows(
    case: str, measured: Measured, payload: Payload, hosts: int, goals_of: str
) -> list[Row]:
    """Returns the rows for a lab's hosts.

    Args:
        goals_of: case whose goals apply; "" for none.
    """
    local = _walls(measured, LOCAL)
    rows = []
    for name, candidate in CANDIDATES.items():
        if candidate.peer is None or name not in measured.timings:
            continue
        peer, about = candidate.peer, f"{case}, {name}"
        ours, theirs = _walls(measured, name), _walls(measured, peer)
        least = candidate.least(payload, hosts)
        ideals = [
            max(own, least / rate * 1e3) for own, rate in zip(local, measured.line, strict=True)
        ]
        exposed = _exposed(ours, local), _exposed(theirs, local)
        sent = measured.sent[name]
        wanted = (goals_of, name)
        rows += [
            _row(f"{about}, step", "ms", ours, peer, theirs, ideals, goals.train_step(*wanted)),
            _row(
                f"{about}, exposed", "ms", exposed[0], peer, exposed[1], [],
                goals.train_exposed(*wanted),
            ),
            _row(
                f"{about}, step", "ms", ours, "ideal", ideals, ideals,
                goals.train_over_ideal(*wanted),
            ),
            _row(
                f"{about}, sent by a host", "B", sent, "the least", [least], [least],
                goals.train_sent(*wanted),
            ),
        ]  # fmt: skip
    return rows


def host_rows(case: str, measured: Measured, goals_of: str) -> list[Row]:
    """Returns the rows for one host: wall and CPU time."""
    rows = []
    for name, candidate in CANDIDATES.items():
        if candidate.peer is None or name not in measured.timings:
            continue
        goal = goals.train_step(goals_of, name)
        ours, theirs = measured.timings[name], measured.timings[candidate.peer]
        for what in ("wall", "cpu"):
            mine, peers = (
                [getattr(timing, what) / 1e3 for timing in timings] for timings in (ours, theirs)
            )
            shown = f"{case}, {name}, {'CPU' if what == 'cpu' else what} a step"
            rows.append(_row(shown, "ms", mine, candidate.peer, peers, [], goal))
    return rows


def _row(
    case: str,
    unit: str,
    ours: list[float],
    peer: str,
    peers: list[float],
    bounds: list[float],
    at_most: goals.Shares,
) -> Row:
    asked = (None, None) if at_most is None else (1 / at_most[0], 1 / at_most[1])
    return Row.of_times(case, unit, ours, peer, peers, bounds, *asked)


def _walls(measured: Measured, name: str) -> list[float]:
    timings: list[Timing] = measured.timings[name]
    return [timing.wall / 1e3 for timing in timings]


def _exposed(steps: list[float], local: list[float]) -> list[float]:
    return [max(a - b, LEAST_EXPOSED_MS) for a, b in zip(steps, local, strict=True)]
