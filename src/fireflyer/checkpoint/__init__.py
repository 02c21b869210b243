"""Checkpoint Manager: asynchronous, verified, resumable saves (the paper's §VII-A)."""

from fireflyer.checkpoint.face import CheckpointManager, SaveHandle
from fireflyer.checkpoint.leaves import Shard

__all__ = ["CheckpointManager", "SaveHandle", "Shard"]
