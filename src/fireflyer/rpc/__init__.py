"""Length-prefixed messages between processes."""
