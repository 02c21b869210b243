"""Training that continues without lost ranks and admits newcomers."""
