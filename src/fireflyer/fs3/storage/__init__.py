"""Storage node: the agent that controls the native service (docs/internals/fs3-service.md)."""

from fireflyer.fs3.storage.node import StorageNode

__all__ = ["StorageNode"]
