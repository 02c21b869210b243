"""Whose checkpoint a state is: each face of a training library loads what it has saved itself."""

from typing import Any

from fireflyer.errors import CheckpointError

_KEYS = {
    "fireflyer.checkpoint.hfai": {"parts", "epoch", "step", "others", "calls"},
    "fireflyer.checkpoint.lightning": {"lightning", "mid_epoch"},
    "fireflyer.checkpoint.transformers": {"model", "optimizer", "scheduler", "trainer_state"},
}
"""Of the state that each face saves, at least."""


def check_origin(state: Any, face: str) -> None:
    """
    Args:
        face: the name of its module.

    Raises:
        CheckpointError: saying who has saved the state, if the face has not.
    """
    if not _has(state, face):
        others = (f"by {other}" for other in _KEYS if _has(state, other))
        saver = next(others, "by a CheckpointManager of its own, with another state")
        raise CheckpointError(
            f"{face} cannot load the checkpoint: it was saved {saver}; give it a directory of its own"
        )


def _has(state: Any, face: str) -> bool:
    return isinstance(state, dict) and _KEYS[face] <= set(state)
