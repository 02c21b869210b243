"""Benchmark of the profiler's cost to the process that it profiles."""
