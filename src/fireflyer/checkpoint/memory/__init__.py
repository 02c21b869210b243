"""The memory tier: replicas of saves in keepers, and how ranks reach them."""
