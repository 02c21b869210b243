"""Benchmark of the key-value store and the page cache."""
