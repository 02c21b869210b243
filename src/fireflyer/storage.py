"""The storage protocol: read ranges, write, list, rename, sync."""
