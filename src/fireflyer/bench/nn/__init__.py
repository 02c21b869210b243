"""Operators and low-bit training of fireflyer.nn against torch's eager and compiled ones."""
