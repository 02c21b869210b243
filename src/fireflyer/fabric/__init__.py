"""The network of a cluster: plan, route, verify, price (docs/guide/fabric.md)."""
