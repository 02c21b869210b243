"""Checkpoint Manager: asynchronous, verified, resumable saves (the paper's §VII-A).

Importing this package alone does not import torch: a node's keeper lives in it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fireflyer.checkpoint.face import CheckpointManager as CheckpointManager
    from fireflyer.checkpoint.face import SaveHandle as SaveHandle

__all__ = ["CheckpointManager", "SaveHandle"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import fireflyer.checkpoint.face as face

        return getattr(face, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
