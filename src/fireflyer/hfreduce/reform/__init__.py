"""Groups formed anew with fewer or more members."""
