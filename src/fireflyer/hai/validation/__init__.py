"""Validation of idle nodes by the platform: weekly, after a fault, and before a return to
service."""
