"""Averages of gradients: buckets, their reductions, and the parameters that wait for them."""
