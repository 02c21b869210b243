"""The controller, which is the only writer of tasks, and its parts."""
