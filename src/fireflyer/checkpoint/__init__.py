"""Checkpoint Manager: asynchronous, verified, resumable saves."""
