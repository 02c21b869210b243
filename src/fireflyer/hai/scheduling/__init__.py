"""Scheduling: the queue, the pure planner, its policies, and explanations of waits."""
