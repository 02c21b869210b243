"""Roles of the two peers of a connection, as the handshake names them."""

import enum


class Role(enum.IntEnum):
    CLIENT = 1
    MANAGER = 2
    META = 3
    STORAGE = 4


NO_MANAGER: dict[int, str] = {
    Role.STORAGE: "is the address of a storage node; the manager's is needed: `manager` in cluster.toml"
}
"""Error message if the server is neither a manager nor a metadata service, by the server's role."""
