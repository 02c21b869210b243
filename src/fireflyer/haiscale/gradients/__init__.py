"""Averages of gradients: buckets, their reductions, and what waits for them."""
