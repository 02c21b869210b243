"""`fireflyer ledger`."""
