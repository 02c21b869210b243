"""Benchmark of the profiler: what it costs the process that it profiles."""
