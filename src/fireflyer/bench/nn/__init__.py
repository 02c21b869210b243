"""Operators and low-bit training of fireflyer.nn against eager and compiled torch."""
