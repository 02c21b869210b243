"""Benchmarks: one module a part, one row format."""
