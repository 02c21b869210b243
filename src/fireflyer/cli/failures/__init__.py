"""`fireflyer failures`."""
