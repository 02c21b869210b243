"""From what `bench train` measured to the rows of its report."""

from fireflyer.bench import goals
from fireflyer.bench.engine import Timing
from fireflyer.bench.options import WIRES
from fireflyer.bench.report import Row
from fireflyer.bench.train_candidates import CANDIDATES, LOCAL
from fireflyer.bench.train_place import Measured

LEAST_EXPOSED_MS = 0.1  # less counts as this: it is within the clock's noise

Goal = tuple[float | None, float | None]


def lab_rows(case: str, measured: Measured, bound: float, goals_of: str) -> list[Row]:
    """Of hosts of a lab.

    Args:
        bound: bytes that a host must send in a step with the float32 wire.
        goals_of: which case's goals are asked; "" for none.
    """
    local = _walls(measured, LOCAL)
    rows = []
    for name, candidate in CANDIDATES.items():
        if candidate.peer is None or name not in measured.timings:
            continue
        asked = goals_of if candidate.asked else ""
        about = f"{case}, {name}"
        ours, theirs = _walls(measured, name), _walls(measured, candidate.peer)
        least = bound * WIRES.get(candidate.wire, 4) / 4
        ideals = [
            max(own, least / rate * 1e3) for own, rate in zip(local, measured.line, strict=True)
        ]
        over = goals.OVER_IDEAL_DDP if asked and candidate.wire == "fp32" else None
        exposed = goals.EXPOSED_DDP if (asked, candidate.wire) == ("1", "fp32") else None
        bytes_goal = goals.TRAIN_BYTES if asked and candidate.wire == "fp32" else None
        rows += [
            _row(
                f"{about}, step", "ms", ours, candidate.peer, theirs, ideals,
                _at_most(goals.train_ddp(asked, candidate.wire)),
            ),
            _row(
                f"{about}, exposed", "ms", _exposed(ours, local), candidate.peer,
                _exposed(theirs, local), [], _at_most(exposed),
            ),
            _row(f"{about}, step", "ms", ours, "ideal", ideals, ideals, _at_most(over)),
            _row(
                f"{about}, sent by a host", "B", measured.sent[name], "2S(H-1)/H", [least],
                [least], _at_most(bytes_goal),
            ),
        ]  # fmt: skip
    return rows


def host_rows(case: str, measured: Measured) -> list[Row]:
    """Of one host: wall and CPU time."""
    rows = []
    for name, candidate in CANDIDATES.items():
        if candidate.peer is None or name not in measured.timings:
            continue
        goal = goals.train_ddp("host", candidate.wire) if candidate.asked else None
        ours, theirs = measured.timings[name], measured.timings[candidate.peer]
        for what in ("wall", "cpu"):
            mine, peers = (
                [getattr(timing, what) / 1e3 for timing in timings] for timings in (ours, theirs)
            )
            shown = f"{case}, {name}, {'CPU' if what == 'cpu' else what} a step"
            rows.append(_row(shown, "ms", mine, candidate.peer, peers, [], _at_most(goal)))
    return rows


def _row(
    case: str,
    unit: str,
    ours: list[float],
    peer: str,
    peers: list[float],
    bounds: list[float],
    goal: Goal,
) -> Row:
    return Row.of_times(case, unit, ours, peer, peers, bounds, *goal)


def _at_most(shares: tuple[float, float] | None) -> Goal:
    """Goal and aim of ratios from those of shares of the peer's time."""
    return (None, None) if shares is None else (1 / shares[0], 1 / shares[1])


def _walls(measured: Measured, name: str) -> list[float]:
    timings: list[Timing] = measured.timings[name]
    return [timing.wall / 1e3 for timing in timings]


def _exposed(steps: list[float], local: list[float]) -> list[float]:
    return [max(a - b, LEAST_EXPOSED_MS) for a, b in zip(steps, local, strict=True)]
