"""Validation of nodes by the platform: on idle nodes, weekly, after a fault, before a return."""
