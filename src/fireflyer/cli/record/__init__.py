"""`fireflyer record`."""
