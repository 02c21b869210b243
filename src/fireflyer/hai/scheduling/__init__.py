"""Who runs where and when: the queue, the pure planner, its policies, and why a task waits."""
