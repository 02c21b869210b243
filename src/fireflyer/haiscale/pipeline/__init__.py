"""Pipelines: stages of a model on several ranks, trained by micro-batches (paper section V-B).

    dp, pp = make_subgroups(pp_size=4)
    stage = partition(model, pp.rank(), pp.size())
    pipe = PipeDream(DistributedDataParallel(stage, dp), chunks=8, process_group=pp)
    loss, outputs = pipe.forward_backward(x, criterion=criterion, labels=y)

`schedules` alone is pure and does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fireflyer.haiscale.pipeline.executor import GPipe as GPipe
    from fireflyer.haiscale.pipeline.executor import Interleaved1F1B as Interleaved1F1B
    from fireflyer.haiscale.pipeline.executor import PipeDream as PipeDream
    from fireflyer.haiscale.pipeline.executor import ZeroBubble as ZeroBubble
    from fireflyer.haiscale.pipeline.groups import make_subgroups as make_subgroups
    from fireflyer.haiscale.pipeline.stages import partition as partition

_HOMES = {
    "GPipe": "executor",
    "Interleaved1F1B": "executor",
    "PipeDream": "executor",
    "ZeroBubble": "executor",
    "make_subgroups": "groups",
    "partition": "stages",
}

__all__ = [
    "GPipe",
    "Interleaved1F1B",
    "PipeDream",
    "ZeroBubble",
    "make_subgroups",
    "partition",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
