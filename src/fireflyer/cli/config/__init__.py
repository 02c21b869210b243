"""`fireflyer config`."""
