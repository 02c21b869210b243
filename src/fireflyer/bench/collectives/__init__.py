"""Benchmarks of collectives: on one host, between hosts of a lab, and per call."""
