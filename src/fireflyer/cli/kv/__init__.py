"""`fireflyer kv`."""
