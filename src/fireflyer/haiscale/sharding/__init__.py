"""Sharded models: units, communication, prefetch, and the move to another layout."""
