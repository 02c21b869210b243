"""Benchmark of the network's flows: `fireflyer bench net`."""
