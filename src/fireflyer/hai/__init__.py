"""HAI Platform: tasks, time sharing, failure handling."""
