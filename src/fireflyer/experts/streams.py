"""Streams of requests for experts, drawn from a seed."""

from collections.abc import Callable

import numpy as np


def zipf(experts: int, requests: int, seed: int, *, exponent: float = 1.0) -> list[int]:
    """Draws independent requests; the r-th most popular expert has a weight of 1/r^exponent.

    The order of popularity is random.
    """
    random = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, experts + 1) ** exponent
    ranks = random.choice(experts, requests, p=weights / weights.sum())
    numbers: list[int] = random.permutation(experts)[ranks].tolist()
    return numbers


def bursty(
    experts: int, requests: int, seed: int, *, topic: int = 8, length: float = 64.0
) -> list[int]:
    """Draws requests in bursts of geometric length; each burst uses few experts.

    Args:
        topic: number of experts of a burst, drawn uniformly.
        length: mean number of requests of a burst.
    """
    random = np.random.default_rng(seed)
    found: list[int] = []
    while len(found) < requests:
        members = random.choice(experts, min(topic, experts), replace=False)
        count = int(random.geometric(1.0 / length))
        found += random.choice(members, count).tolist()
    return found[:requests]


STREAMS: dict[str, Callable[[int, int, int], list[int]]] = {"zipf": zipf, "bursty": bursty}
