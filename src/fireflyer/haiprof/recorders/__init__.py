"""Recorders: plug-ins that measure values beside phases and stacks, each at its own interval."""

from fireflyer.haiprof.recorders.registry import Recorder, available, chosen

__all__ = ["Recorder", "available", "chosen"]
