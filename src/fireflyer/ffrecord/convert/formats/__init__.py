"""One module a format, each read as a `Source`."""
