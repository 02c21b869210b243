"""Benchmark of the mounted file system: `fireflyer bench mount`."""
