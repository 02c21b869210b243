"""`fireflyer fs`."""
