"""Checkpoint Manager: asynchronous, verified, resumable saves (the paper's §VII-A).

Importing this package alone does not import torch: a node's keeper lives in it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fireflyer.extras import need_torch

if TYPE_CHECKING:
    from fireflyer.checkpoint.face import CheckpointManager as CheckpointManager
    from fireflyer.checkpoint.handle import SaveHandle as SaveHandle
    from fireflyer.checkpoint.inmemory import InMemory as InMemory
    from fireflyer.checkpoint.leaves import Shard as Shard
    from fireflyer.checkpoint.retention import Keep as Keep

_HOMES = {
    "CheckpointManager": "face",
    "SaveHandle": "handle",
    "InMemory": "inmemory",
    "Shard": "leaves",
    "Keep": "retention",
}

__all__ = ["CheckpointManager", "InMemory", "Keep", "SaveHandle", "Shard"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        need_torch(f"{__name__}.{name}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
