"""Directories of checkpoints: manifests, claims, the catalog, and tools that inspect them."""
