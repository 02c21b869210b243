"""HTTP between clients and the platform: accounts, tokens, responses, streams."""
