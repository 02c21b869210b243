"""Checkpoint Manager: asynchronous, verified, resumable saves (the paper's §VII-A)."""

from fireflyer.checkpoint.face import CheckpointManager, SaveHandle

__all__ = ["CheckpointManager", "SaveHandle"]
