"""Peers of the benchmarks: scripts that run in separate environments, and file systems to mount."""
