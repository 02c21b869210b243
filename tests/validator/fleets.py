"""Synthetic fleets with known defective nodes."""

import numpy as np

Samples = dict[str, list[float]]


def fleet(
    seed: int,
    *,
    nodes: int = 200,
    samples: int = 20,
    share: float = 0.05,
    least: float = 0.05,
    most: float = 0.10,
    scatter: float = 0.01,
    noise: float = 0.02,
    intermittent: bool = False,
) -> tuple[Samples, set[str]]:
    """Draws measurements and the defective nodes.

    Args:
        share: share of nodes that are defective.
        least, most: their loss, drawn uniformly.
        scatter: standard deviation between healthy nodes.
        noise: scale of the noise, a t distribution with 3 degrees of freedom.
        intermittent: a quarter of a defective node's measurements lose 20 % instead.
    """
    draw = np.random.default_rng(seed)
    level = 100.0 * (1 + draw.normal(0, scatter, nodes))
    values = level[:, None] * (1 + noise * draw.standard_t(3, (nodes, samples)))
    bad = draw.choice(nodes, round(share * nodes), replace=False)
    if intermittent:
        values[bad] *= 1 - 0.2 * (draw.random((len(bad), samples)) < 0.25)
    else:
        values[bad] *= 1 - draw.uniform(least, most, len(bad))[:, None]
    return {f"n{at}": list(row) for at, row in enumerate(values)}, {f"n{at}" for at in bad}


def f1(named: set[str], bad: set[str]) -> float:
    """Returns the harmonic mean of precision and recall."""
    return 2 * len(named & bad) / (len(named) + len(bad)) if named or bad else 1.0
