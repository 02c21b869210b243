"""The verbs about nodes and the queue."""
