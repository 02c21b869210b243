"""The checkpoint benchmark: saves and loads against other libraries and the disk."""
