"""Cluster manager of fs3: nodes and their leases, chains, the primary. See docs/internals/fs3-chain.md."""
