"""Views of a profile: text, HTML, Prometheus, and a live table. All but the last are pure."""
