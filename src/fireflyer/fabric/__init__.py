"""Networks of clusters: plan, route, verify, price (docs/guide/fabric.md)."""
