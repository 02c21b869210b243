"""Saves and loads of a training state against torch's ways, safetensors and the machine.

In each round every candidate does the same once, one after the other, in an order that turns. Every load is
compared with what was saved. Less is better, except for steps a second.
"""

from collections.abc import Callable

from fireflyer.bench import checkpoint_loads as loads
from fireflyer.bench import checkpoint_saves as saves
from fireflyer.bench.checkpoint_setting import Say, Setting, Spec
from fireflyer.bench.report import Row

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
    """All groups of `spec.only`, in the order of GROUPS.

    Raises:
        CheckpointError: what was loaded is not what was saved, or a manager failed.
        ConfigError: fio refuses.
    """
    setting = Setting(spec, say)
    return [row for name, group in GROUPS.items() if name in spec.only for row in group(setting)]
