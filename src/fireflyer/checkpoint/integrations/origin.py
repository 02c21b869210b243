"""Origin check: each training library's integration loads only the states that it saved itself."""

from typing import Any

from fireflyer.errors import CheckpointError

_KEYS = {
    "fireflyer.checkpoint.integrations.hfai": {"parts", "epoch", "step", "others", "calls"},
    "fireflyer.checkpoint.integrations.lightning": {"lightning", "mid_epoch"},
    "fireflyer.checkpoint.integrations.transformers": {
        "model",
        "optimizer",
        "scheduler",
        "trainer_state",
    },
}
"""Minimum keys of the state that each integration saves, by module name."""


def check_origin(state: Any, integration: str) -> None:
    """Checks that a state was saved by an integration.

    Args:
        integration: the name of the integration's module.

    Raises:
        CheckpointError: if another module saved the state; the error names that module.
    """
    if not _has(state, integration):
        others = (f"by {other}" for other in _KEYS if _has(state, other))
        saver = next(others, "by a CheckpointManager of its own, with another state")
        raise CheckpointError(
            f"{integration} cannot load the checkpoint: it was saved {saver}; use a directory of its own"
        )


def _has(state: Any, integration: str) -> bool:
    return isinstance(state, dict) and _KEYS[integration] <= set(state)
