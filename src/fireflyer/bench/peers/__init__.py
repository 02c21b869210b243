"""What ours is measured against: scripts that run in environments of their own, and file systems to mount."""
