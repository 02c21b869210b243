"""`fireflyer sim`."""
