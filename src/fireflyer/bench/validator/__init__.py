"""Benchmarks of the validator's checks."""
