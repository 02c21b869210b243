"""The cluster manager of fs3: nodes and their leases, chains, who is primary. See docs/fs3-chain.md."""
