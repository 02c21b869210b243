"""Benchmarks of the platform: its own costs, and its API under load."""
