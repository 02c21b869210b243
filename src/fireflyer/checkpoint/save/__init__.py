"""Saving: the plan of who writes what, copies into the arena, data files, and the commit."""
