"""`fireflyer net`."""
