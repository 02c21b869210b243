"""Search for the fastest layout that fits. Pure."""

import contextlib
from collections.abc import Iterator

from fireflyer.errors import ConfigError
from fireflyer.haiscale.pipeline import schedules
from fireflyer.haiscale.planner.costs import Plan, plan
from fireflyer.haiscale.planner.presets import Cluster, Layout, Model

MICRO = (1, 2, 4)


def candidates(model: Model, gpus: int) -> Iterator[Layout]:
    """Yields all layouts to price: stages, micro-batch sizes, schedules."""
    for pp in range(1, min(gpus, model.layers) + 1):
        if gpus % pp:
            continue
        for micro in MICRO:
            for kind in schedules.KINDS if pp > 1 else (schedules.PIPEDREAM,):
                chunks = 2 if kind == schedules.INTERLEAVED else 1
                yield Layout(pp=pp, dp=gpus // pp, micro=micro, schedule=kind, chunks=chunks)


def search(model: Model, cluster: Cluster, gpus: int) -> tuple[list[Plan], int]:
    """Returns the plans of layouts that fit the GPUs' memory, fastest first, and how many do not.

    Raises:
        ConfigError: no layout fits.
    """
    fitting, others = [], 0
    for layout in candidates(model, gpus):
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
    """Returns one sentence: why the first plan wins."""
    best = plans[0]
    other = next((one for one in plans if one.layout.pp != best.layout.pp), None)
    text = (
        f"{best.layout.text()} wins with {best.step_s:.3g} s a step: {best.bubble:.1%} of it is the "
        f"bubble and {best.allreduce_s:.2g} s the allreduce"
    )
    if other is not None:
        text += (
            f", against {other.step_s:.3g} s with pp={other.layout.pp} ({other.bubble:.1%} bubble, "
            f"{other.allreduce_s:.2g} s allreduce)"
        )
    return text + f"; {others} layouts do not fit the memory."
