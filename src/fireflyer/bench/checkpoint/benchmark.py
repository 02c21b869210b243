"""Comparison of saves and loads of a training state with torch, safetensors and the machine's
limits.

In each round every candidate does the same work once, one after the other, in rotating order. The
result of every load is compared with the saved state. Less is better, except for steps per second.
"""

from collections.abc import Callable

from fireflyer.bench.checkpoint import loads, saves
from fireflyer.bench.checkpoint.context import Say, Setting, Spec
from fireflyer.bench.harness.report import Row

__all__ = ["GROUPS", "Spec", "run"]

GROUPS: dict[str, Callable[[Setting], list[Row]]] = {
    "stall": saves.stall,
    "total": saves.total,
    "load": loads.load,
    "overlap": saves.overlap,
    "one": loads.one,
    "memory": loads.memory,
    "training": saves.training,
}


def run(spec: Spec, say: Say) -> list[Row]:
    """Runs all groups of `spec.only`, in the order of GROUPS.

    Raises:
        CheckpointError: the loaded state differs from the saved one, or a manager failed.
        ConfigError: fio fails.
    """
    setting = Setting(spec, say)
    return [row for name, group in GROUPS.items() if name in spec.only for row in group(setting)]
