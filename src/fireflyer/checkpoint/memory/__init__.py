"""Memory tier: replicas of saves in keepers, and the ranks' access to them."""
