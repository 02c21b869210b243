"""Built-in checks of a node's hardware."""
