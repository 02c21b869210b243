"""Routes of the dashboard: pages, streams and changes."""
