"""The `fireflyer` command."""
