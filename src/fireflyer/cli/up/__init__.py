"""`fireflyer up`."""
