"""Benchmark of environments in batches."""
