"""`fireflyer workspace`."""
