"""Recorders: what is measured beside phases and stacks, each a plug-in with an interval of its own."""

from fireflyer.haiprof.recorders.registry import Recorder, available, chosen

__all__ = ["Recorder", "available", "chosen"]
