"""`fireflyer user`, `group`, `token`, `quota` and `audit`."""
