"""Charts of the dashboard: geometry of inline SVG."""
