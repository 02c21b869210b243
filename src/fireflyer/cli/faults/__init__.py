"""`fireflyer faults`."""
