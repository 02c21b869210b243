"""The record benchmark: random batch reads against other formats."""
