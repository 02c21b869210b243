"""`fireflyer validate`."""
