"""The server: its process, its listeners and its HTTP routes."""
