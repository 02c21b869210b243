"""The part of the profiler inside the process that is profiled."""
