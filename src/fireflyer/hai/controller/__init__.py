"""The controller: the only writer of tasks, and what it consists of."""
