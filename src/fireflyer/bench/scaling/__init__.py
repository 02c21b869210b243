"""Weak scaling beyond this machine: a model with measured costs."""
