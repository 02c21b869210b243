"""The supervisor of one task on one node, its messages, and its readers of the node's state."""

LISTENER, FORK_SERVER = 3, 4
"""Descriptors of the supervisor: the listening socket, and the socket to the fork server."""
