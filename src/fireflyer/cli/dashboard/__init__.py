"""`fireflyer dashboard`."""
