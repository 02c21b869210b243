"""Judgement of one check over a fleet: the nodes that are worse than the others. Pure.

The criterion is the distribution of a typical node's measurements. A node is compared with it by
the one-sided area between the two empirical distribution functions: only measurements worse than
the criterion count. The idea comes from SuperBench (USENIX ATC 2024). The thresholds are learnt
from the fleet's own scatter, because a fixed similarity of 0.95 misses most nodes that lost 5 % of
their speed (docs/guide/validator.md).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fireflyer.validator.model import Better

Part = Literal["body", "tail"]
"""Part of a node's measurements that decides its judgement. If most measurements of a bad node are
worse, the body decides. If only some are worse, as with an intermittent fault, the tail decides."""

Array = NDArray[np.float64]

LEAST_NODES = 3
"""Minimum number of nodes for a criterion: of two nodes that differ, either may be the bad one."""

MOST_LEVELS = 200
"""Maximum number of quantiles that represent a node's measurements."""

FALSE_ALARM = 5e-4
"""Probability that the body alone names a healthy node, if the scatter is normally distributed."""

TAIL = 1.5
"""Ratio of the tail's threshold to the body's: extreme measurements scatter more."""

TRIMMED = 10
"""The body leaves out 1 / TRIMMED of the measurements at each end, because extremes say little
about the typical measurement."""

TRIM_FROM = 5
"""Minimum number of measurements for which the body is trimmed."""

TAIL_SHARE = 0.2
"""Share of all measurements: the worst ones, which form the tail. The worst twentieth of all
measurements, at least one, is left out of the tail."""

TAIL_SAMPLES = 10
"""Minimum number of measurements for a tail."""

LEAST_LOSS = 0.01
"""Loss below which no node is defective, however small the fleet's scatter is."""

LEAST_SCALE = 1e-100
"""Size below which a criterion's median counts as 0, so that no loss relative to it is computed."""

ROUNDS = 20
"""Maximum number of refinements of the criterion."""

MAD = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""

FIXED = 0.05
"""Minimum loss against the fleet's median for which the fixed rule names a node."""

Z_LIMIT = 3.0
"""Minimum robust z-score for which the z-score rule names a node."""


class NodeJudgement(msgspec.Struct, frozen=True, kw_only=True):
    """Judgement of one node in one check."""

    node: str
    samples: int
    median: float
    similarity: float
    """1 minus the one-sided area between the distributions, relative to the criterion's median. The
    value is that of the part that decided."""
    deviation: float
    """Distance from the fleet, in robust standard deviations: the larger of both parts' distances,
    with the tail's divided by `TAIL`."""
    defective: bool
    part: Part
    fixed: bool
    """True if the node's median is at least `FIXED` worse than the median of all nodes."""
    zscore: bool
    """True if the node's mean is at least `Z_LIMIT` robust standard deviations worse than the
    median of all nodes' means."""


class CheckJudgement(msgspec.Struct, frozen=True, kw_only=True):
    """Judgement of one check over all nodes."""

    check: str
    better: Better
    criterion: float | None
    """Median of the criterion; None if there is no criterion."""
    threshold: float | None
    """Similarity of the body below which a node is defective; None if there is no criterion."""
    scatter: float | None
    """Robust standard deviation between healthy nodes, relative to the criterion's median."""
    reason: str
    """Reason why there is no criterion; empty if there is one."""
    nodes: tuple[NodeJudgement, ...]


def multiplier(nodes: int) -> float:
    """Returns the number of robust standard deviations above which a node is defective.

    The number comes from Student's distribution, because the scatter of few nodes is known only
    imprecisely: fewer nodes need a larger distance.
    """
    from scipy.special import stdtrit

    return -float(stdtrit(nodes - 1, FALSE_ALARM))


def judge(check: str, samples: Mapping[str, Sequence[float]], better: Better) -> CheckJudgement:
    """Judges all nodes by their measurements of one check.

    Args:
        check: name of the check.
        samples: finite measurements of each node, at least one per node.
        better: whether more or less is better.
    """
    names = list(samples)
    if len(names) < LEAST_NODES:
        count = "1 node" if len(names) == 1 else f"{len(names)} nodes"
        return _without(check, samples, better, f"{count}: no criterion below {LEAST_NODES} nodes")
    least = min(len(values) for values in samples.values())
    levels = min(least, MOST_LEVELS)
    at = (np.arange(levels) + 0.5) / levels
    sign = 1.0 if better == "more" else -1.0
    curves = np.array(
        [
            np.quantile(sign * np.asarray(samples[name], np.float64), at, method="hazen")
            for name in names
        ]
    )
    scale = float(abs(np.median(medoid(curves))))
    if scale < LEAST_SCALE:
        return _without(check, samples, better, "the criterion's median is 0: losses have no scale")
    return _judged(check, samples, better, curves, scale)


def medoid(curves: Array) -> Array:
    """Returns the curve with the smallest sum of areas to all other curves.

    Args:
        curves: quantiles of each node, shape (nodes, levels).
    """
    if curves.shape[1] == 1:
        found: Array = curves[np.argsort(curves[:, 0])[(len(curves) - 1) // 2]]
        return found
    totals = [float(np.abs(curves - curve).mean(axis=1).sum()) for curve in curves]
    found = curves[int(np.argmin(totals))]
    return found


def _judged(
    check: str, samples: Mapping[str, Sequence[float]], better: Better, curves: Array, scale: float
) -> CheckJudgement:
    parts = _parts(curves.shape[1])
    limit = multiplier(len(curves))
    criterion = medoid(curves)
    good = np.ones(len(curves), bool)
    for _ in range(ROUNDS):
        gaps = (criterion - curves) / scale
        found = {part: _Distances(gaps[:, where], good) for part, where in parts.items()}
        now = np.ones(len(curves), bool)
        for part, distances in found.items():
            now &= distances.area <= distances.limit(_limit(part, limit))
        if (now == good).all() or now.sum() < LEAST_NODES:
            break
        good = now
        criterion = np.median(curves[good], axis=0)
    body, plain = found["body"], _plain(samples, better)
    sign = 1.0 if better == "more" else -1.0
    return CheckJudgement(
        check=check,
        better=better,
        criterion=sign * float(np.median(criterion)),
        threshold=1.0 - body.limit(limit),
        scatter=body.scatter,
        reason="",
        nodes=tuple(
            _node(name, at, samples[name], found, limit, plain[name])
            for at, name in enumerate(samples)
        ),
    )


def _limit(part: Part, limit: float) -> float:
    return limit if part == "body" else TAIL * limit


def _parts(levels: int) -> dict[Part, slice]:
    """Returns the range of quantiles of each part; quantiles are sorted from worst to best."""
    trimmed = -(-levels // TRIMMED) if levels >= TRIM_FROM else 0
    parts: dict[Part, slice] = {"body": slice(trimmed, levels - trimmed)}
    if levels >= TAIL_SAMPLES:
        parts["tail"] = slice(max(1, levels // 20), int(TAIL_SHARE * levels))
    return {part: where for part, where in parts.items() if where.stop > where.start}


class _Distances:
    """Distances of all nodes to a criterion, in one part of their measurements."""

    def __init__(self, gaps: Array, good: NDArray[np.bool_]) -> None:
        """
        Args:
            gaps: loss against the criterion at each quantile, shape (nodes, levels).
            good: mask of the nodes whose scatter counts.
        """
        self.area: Array = np.maximum(gaps, 0.0).mean(axis=1)
        shift = gaps.mean(axis=1)
        self.centre = float(np.median(shift[good]))
        between = MAD * float(np.median(np.abs(shift[good] - self.centre)))
        # The median absolute deviation of a few nodes may be tiny by chance. The scatter within each
        # node is a lower bound, because it limits how precisely a shift is known.
        inner = gaps - gaps.mean(axis=0)
        within = MAD * float(np.median(np.abs(inner - np.median(inner, axis=1)[:, None])))
        self.scatter = max(between, within / math.sqrt(gaps.shape[1]))

    def limit(self, multiplier: float) -> float:
        """Returns the area above which a node is defective."""
        return max(float(self.centre + multiplier * self.scatter), LEAST_LOSS)


def _node(
    name: str, at: int, values: Sequence[float], found: Mapping[Part, _Distances], limit: float,
    plain: tuple[bool, bool],
) -> NodeJudgement:  # fmt: skip
    part: Part = "body"
    excess = {
        each: float(distances.area[at]) / distances.limit(_limit(each, limit))
        for each, distances in found.items()
    }
    if excess["body"] <= 1.0 < excess.get("tail", 0.0):
        part = "tail"
    area = float(found[part].area[at])
    return NodeJudgement(
        node=name,
        samples=len(values),
        median=float(np.median(values)),
        similarity=1.0 - area,
        deviation=max(excess.values()) * limit,
        defective=excess[part] > 1.0,
        part=part,
        fixed=plain[0],
        zscore=plain[1],
    )


def _plain(samples: Mapping[str, Sequence[float]], better: Better) -> dict[str, tuple[bool, bool]]:
    """Returns the verdicts of the fixed rule and of the z-score rule."""
    sign = 1.0 if better == "more" else -1.0
    medians = sign * np.array([np.median(values) for values in samples.values()])
    means = sign * np.array([np.mean(values) for values in samples.values()])
    centre, middle = float(np.median(medians)), float(np.median(means))
    sigma = MAD * float(np.median(np.abs(means - middle)))
    fixed = medians < centre - FIXED * abs(centre)
    far = means < middle - Z_LIMIT * sigma
    return {
        name: (bool(one), bool(two)) for name, one, two in zip(samples, fixed, far, strict=True)
    }


def _without(
    check: str, samples: Mapping[str, Sequence[float]], better: Better, reason: str
) -> CheckJudgement:
    nodes = tuple(
        NodeJudgement(
            node=name, samples=len(values), median=float(np.median(values)), similarity=1.0,
            deviation=0.0, defective=False, part="body", fixed=False, zscore=False,
        )
        for name, values in samples.items()
    )  # fmt: skip
    return CheckJudgement(
        check=check, better=better, criterion=None, threshold=None, scatter=None, reason=reason,
        nodes=nodes,
    )  # fmt: skip
