"""Search for the fastest layout that fits. Pure."""

import contextlib
import math
from collections.abc import Iterator

from fireflyer.errors import ConfigError
from fireflyer.haiscale.pipeline import schedules
from fireflyer.haiscale.planner.costs import Plan, plan
from fireflyer.haiscale.planner.presets import Cluster, Layout, Model

MICRO = (1, 2, 4)


def candidates(model: Model, cluster: Cluster, gpus: int) -> Iterator[Layout]:
    """Yields all layouts to price: all stages, replicas, micro-batch sizes and schedules."""
    for tp in _divisors(math.gcd(cluster.gpus_per_node, model.heads, gpus)):
        for pp in _divisors(gpus // tp):
            if pp > model.layers:
                continue
            dp = gpus // tp // pp
            for ep in _divisors(math.gcd(dp, model.experts)) if model.experts else (1,):
                for micro in MICRO:
                    for kind in schedules.KINDS if pp > 1 else (schedules.PIPEDREAM,):
                        chunks = 2 if kind == schedules.INTERLEAVED else 1
                        yield Layout(pp, dp, micro, kind, chunks, tp=tp, ep=ep)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def search(model: Model, cluster: Cluster, gpus: int) -> tuple[list[Plan], int]:
    """Returns the plans that fit the GPUs' memory, fastest first, and the number of plans that do
    not fit.

    Raises:
        ConfigError: no layout fits.
    """
    fitting, others = [], 0
    for layout in candidates(model, cluster, gpus):
        with contextlib.suppress(ConfigError):  # the layout does not divide the batch
            found = plan(model, cluster, layout)
            if found.memory <= cluster.memory:
                fitting.append(found)
            else:
                others += 1
    if not fitting:
        raise ConfigError(
            f"no layout of {gpus} GPUs fits: {others} need more than the {cluster.memory / 1e9:g} GB "
            "of a GPU; use more GPUs"
        )
    return sorted(fitting, key=lambda one: (one.step_s, one.memory)), others


def reason(plans: list[Plan], others: int) -> str:
    """Returns one sentence that explains why the first plan wins."""
    best = plans[0]
    shares = _shares(best)
    other = next((one for one in plans if _shares(one) != shares), None)
    text = f"{best.layout.text()} wins with {best.step_s:.3g} s a step: {_losses(best)}"
    if other is not None:
        text += f", against {other.step_s:.3g} s with {other.layout.text()}: {_losses(other)}"
    return text + f"; {others} layouts do not fit the memory."


def _shares(one: Plan) -> tuple[int, int, int]:
    return one.layout.pp, one.layout.tp, one.layout.ep


def _losses(one: Plan) -> str:
    exchanges = f", {one.exchange_s:.2g} s exchanges" if one.exchange_s else ""
    return f"{one.bubble:.1%} bubble, {one.allreduce_s:.2g} s allreduce{exchanges}"
