"""Benchmarks of tensor and expert parallelism."""
