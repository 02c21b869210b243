"""`fireflyer experts`."""
