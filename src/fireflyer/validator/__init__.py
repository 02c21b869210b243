"""Checks of a node's hardware, judgement of a fleet, and statistics of failures (paper, VII-B)."""
