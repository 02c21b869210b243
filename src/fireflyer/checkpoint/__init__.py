"""Checkpoint Manager: asynchronous, verified, resumable saves (the paper's §VII-A).

The package itself does not import torch. Keepers import the package: processes that hold replicas
in memory and work without torch (checkpoint/memory/keeper.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fireflyer.extras import need_torch

if TYPE_CHECKING:
    from fireflyer.checkpoint.handle import SaveHandle as SaveHandle
    from fireflyer.checkpoint.manager import CheckpointManager as CheckpointManager
    from fireflyer.checkpoint.memory.manager_tier import InMemory as InMemory
    from fireflyer.checkpoint.retention import Keep as Keep
    from fireflyer.checkpoint.state.leaves import Shard as Shard

_HOMES = {
    "CheckpointManager": "manager",
    "SaveHandle": "handle",
    "InMemory": "memory.manager_tier",
    "Shard": "state.leaves",
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
