"""Benchmark of experts served from tiers."""
