"""Several hosts on one machine, for tests and experiments."""
