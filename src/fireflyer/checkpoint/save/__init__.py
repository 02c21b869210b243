"""Saving: the plan that divides the writing, copies into the arena, data files, and the commit."""
