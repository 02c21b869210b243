"""Scheduling: the queue, the pure planner, its policies, and why a task waits."""
