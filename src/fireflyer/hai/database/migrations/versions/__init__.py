"""One module per version, named by its number."""
