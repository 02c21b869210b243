"""Parts common to all benchmarks: ranks, interleaved rounds, goals, and the report."""
