"""Directories of checkpoints: manifests, claims, the catalog, and tools that look into them."""
